// A copy in shared memory, in chunks of up to 16 bytes next to those of the neighbouring threads (no
// bank conflicts). The threads of one row write it, and those of every row read it. The barrier before
// the first row publishes it.
struct Weight {
  static constexpr int kChunk = kWeightBytes < 16 ? kWeightBytes : 16;
  static constexpr int kChunks = kWeightBytes / kChunk;

  unsigned char* copy;

  DEVICE unsigned char* slot(int j, int chunk) const {
    return copy + ((j * kChunks + chunk) * kThreadsPerRow + row_thread()) * kChunk;
  }
  DEVICE Weight(const Rows& rows, const WeightElement* weight, unsigned char* smem)
      : copy(smem + kWeightOffset) {
    if (team_index() != 0 || row_abreast() != 0) return;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int column = rows.column(j);
      Packet<kWeightBytes> packet{};
      if (rows.owns(j, column)) packet = load_weights(weight, column);
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
        store_shared_packet<kChunk>(
            slot(j, c), *reinterpret_cast<const Packet<kChunk>*>(packet.words + c * kChunk / 4));
    }
  }
  DEVICE Packet<kWeightBytes> operator[](int j) const {
    Packet<kWeightBytes> packet;
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
      *reinterpret_cast<Packet<kChunk>*>(packet.words + c * kChunk / 4) =
          load_shared_packet<kChunk>(slot(j, c));
    return packet;
  }
};
