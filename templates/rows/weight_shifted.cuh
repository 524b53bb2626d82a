// In registers, as weight_registers.cuh, but element by element: where x is at a vector, the weight is
// not. What is not the row's is 0, or 1 without a weight; x and dy are 0 there.
struct Weight {
  Packet<kWeightBytes> packets[kVectors];

  DEVICE Weight(const Rows& rows, const WeightElement* weight, unsigned char*) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      packets[j] = weight == nullptr ? load_weights(weight, 0) : Packet<kWeightBytes>{};
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        const int column = rows.column(j) + i;
        if (weight == nullptr || !Rows::has(column)) continue;
        const unsigned word = load_weight<sizeof(WeightElement)>(weight + column).words[0];
        if constexpr (sizeof(WeightElement) == 4)
          packets[j].words[i] = word;
        else
          packets[j].words[i / 2] |= word << 16 * (i % 2);
      }
    }
  }
  DEVICE Packet<kWeightBytes> operator[](int j) const { return packets[j]; }
};
