// The weights at the partners of a thread's columns: its own, or in registers.
struct PartnerWeights {
  const Weight& weights;
  Packet<kWeightBytes> packets[kVectors];

  DEVICE PartnerWeights(const Weight& own, const Rows& rows, const WeightElement* weight)
      : weights(own) {
    if constexpr (kOwnPartners) return;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int column = rows.column(j);
      packets[j] = Packet<kWeightBytes>{};
      if (rows.owns(j, column)) packets[j] = load_weights(weight, partner_of(column));
    }
  }
  DEVICE Packet<kWeightBytes> operator[](int j) const {
    if constexpr (kOwnPartners) return weights[(j + kVectors / 2) % kVectors];
    return packets[j];
  }
};
