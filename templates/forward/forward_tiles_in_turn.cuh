// The squares of a thread one after another, as Triton 3.5 to 3.7 adds them. If N is a multiple of 16,
// each addition within the first 16 bytes is contracted with its square. Rows of such an N, and no
// others, are read in vectors.
DEVICE float sum_of_squares(const float (&values)[8]) {
  constexpr int kContracted = kElements > 1 ? 16 / sizeof(Element) : 0;
  float sum = __fmul_rn(values[1], values[1]);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i == 1) continue;
    if (i < kContracted)
      sum = __fmaf_rn(values[i], values[i], sum);
    else
      sum = __fadd_rn(__fmul_rn(values[i], values[i]), sum);
  }
  return sum;
}
