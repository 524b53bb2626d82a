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

DEVICE float4 plus(float4 a, float4 b) {
  return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z),
                     __fadd_rn(a.w, b.w));
}

DEVICE float plus(float a, float b) { return __fadd_rn(a, b); }

// load(kFirst) + ... of kCount values, in pairs and pairs of pairs, so that each passes through few
// additions. Each value is loaded where it is added.
template <int kFirst, int kCount, typename Load> DEVICE auto sum_in_pairs(Load load) {
  if constexpr (kCount == 1)
    return load(kFirst);
  else
    return plus(sum_in_pairs<kFirst, (kCount + 1) / 2>(load),
                sum_in_pairs<kFirst + (kCount + 1) / 2, kCount / 2>(load));
}

// Wide packets travel in chunks of up to 16 bytes.
template <int kBytes> constexpr int kChunkOf = kBytes < 16 ? kBytes : 16;

// The weights that belong to one vector of x, in loads of up to 16 bytes; ones if there is no weight.
DEVICE Packet<kWeightBytes> load_weights(const WeightElement* weight, int column) {
  constexpr int kChunk = kChunkOf<kWeightBytes>;
  constexpr unsigned kOne = sizeof(WeightElement) == 4 ? 0x3f800000u
                            : is_bf16<WeightElement>   ? 0x3f803f80u
                                                       : 0x3c003c00u;
  Packet<kWeightBytes> packet;
  if (weight == nullptr) {
#pragma unroll
    for (unsigned& word : packet.words) word = kOne;
    return packet;
  }
#pragma unroll
  for (int c = 0; c < kWeightBytes / kChunk; ++c)
    *reinterpret_cast<Packet<kChunk>*>(packet.words + c * kChunk / 4) =
        load_weight<kChunk>(weight + column + c * kChunk / static_cast<int>(sizeof(*weight)));
  return packet;
}

// The weight of element i of a packet as the formulas use it. Models that store w - 1 need an offset,
// which is added in fp32.
DEVICE float weight_of(const Packet<kWeightBytes>& packet, int i, float offset) {
  const float w = element<WeightElement>(packet.words, i);
  return kOffset ? __fadd_rn(w, offset) : w;
}

// The dresidual that belongs to one vector of x, from shared memory, with its chunks at `place(chunk)`.
template <typename Place> DEVICE ResidualPacket gather_chunks(Place place) {
  constexpr int kChunk = kChunkOf<kResidualBytes>;
  ResidualPacket packet;
#pragma unroll
  for (int c = 0; c < kResidualBytes / kChunk; ++c)
    *reinterpret_cast<Packet<kChunk>*>(packet.words + c * kChunk / 4) =
        load_shared_packet<kChunk>(place(c));
  return packet;
}

// dx in the residual's dtype.
DEVICE void store_residual(ResidualElement* to, const float* values) {
  constexpr int kChunk = kChunkOf<kResidualBytes>;
  constexpr int kStep = kChunk / static_cast<int>(sizeof(ResidualElement));
#pragma unroll
  for (int c = 0; c < kResidualBytes / kChunk; ++c) {
    Packet<kChunk> packet;
    narrow<ResidualElement, kStep>(packet.words, values + c * kStep);
    store_row<kChunk>(to + c * kStep, packet);
  }
}
