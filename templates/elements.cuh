// ---- Elements of a packet -------------------------------------------------------------------

template <typename T> DEVICE float element(const unsigned* words, int i);
template <> DEVICE float element<bf16>(const unsigned* words, int i) {
  const unsigned word = words[i / 2];
  return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
}
template <> DEVICE float element<fp16>(const unsigned* words, int i) {
  return widen_fp16(static_cast<unsigned short>(words[i / 2] >> (16 * (i % 2))));
}
template <> DEVICE float element<float>(const unsigned* words, int i) {
  return __uint_as_float(words[i]);
}

// Rounds kCount floats, once and to nearest even, into the words of a packet.
template <typename T, int kCount> DEVICE void narrow(unsigned* words, const float* values) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) words[i] = __float_as_uint(values[i]);
  } else if constexpr (kCount == 1) {
    words[0] = is_bf16<T> ? narrow_bf16(values[0]) : narrow_fp16(values[0]);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i += 2)
      words[i / 2] = is_bf16<T> ? pack_bf16(values[i], values[i + 1])
                                : pack_fp16(values[i], values[i + 1]);
  }
}

DEVICE float4 add4(float4 a, float4 b) {
  return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z),
                     __fadd_rn(a.w, b.w));
}

// The weights beside one vector of x, in loads of up to 16 bytes.
DEVICE Packet<kWeightBytes> load_weights(const WeightElement* from) {
  if constexpr (kWeightBytes <= 16) {
    return load_weight<kWeightBytes>(from);
  } else {
    Packet<kWeightBytes> packet;
#pragma unroll
    for (int c = 0; c < kWeightBytes / 16; ++c) {
      const Packet<16> part = load_weight<16>(from + c * 16 / static_cast<int>(sizeof(*from)));
#pragma unroll
      for (int w = 0; w < 4; ++w) packet.words[4 * c + w] = part.words[w];
    }
    return packet;
  }
}

// rstd of the rows of a batch; 0 for rows past the end.
DEVICE void load_rstds(float (&into)[kRowsInFlight], const float* rstd, long long batch,
                       long long count) {
#pragma unroll
  for (int u = 0; u < kRowsInFlight; ++u) {
    const long long row = batch * kRowsInFlight + u;
    into[u] = row < count ? load_rstd(rstd + row) : 0.0f;
  }
}
