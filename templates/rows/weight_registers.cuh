struct Weight {
  Packet<kWeightBytes> packets[kVectors];

  DEVICE Weight(const Rows& rows, const WeightElement* weight, unsigned char*) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int column = rows.column(j);
      packets[j] = Packet<kWeightBytes>{};
      if (rows.owns(j, column)) packets[j] = load_weights(weight, column);
    }
  }
  DEVICE Packet<kWeightBytes> operator[](int j) const { return packets[j]; }
};
