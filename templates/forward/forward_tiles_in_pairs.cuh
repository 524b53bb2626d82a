// The squares of a thread in pairs and pairs of pairs, as Triton 3.8 and 3.9 add them. If N is a multiple
// of 16, the addition within a pair is contracted with the first square. Rows of such an N, and no
// others, are read in vectors.
DEVICE float sum_of_squares(const float (&values)[8]) {
  float pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float first = values[2 * i], second = __fmul_rn(values[2 * i + 1], values[2 * i + 1]);
    pairs[i] = kElements > 1 ? __fmaf_rn(first, first, second)
                             : __fadd_rn(__fmul_rn(first, first), second);
  }
  return __fadd_rn(__fadd_rn(pairs[0], pairs[1]), __fadd_rn(pairs[2], pairs[3]));
}
