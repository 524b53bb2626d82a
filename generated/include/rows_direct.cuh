// ---- Rows: plain vector loads into registers -------------------------------------------------
// dx may not be the memory of dy: these loads are ld.global.nc, for memory that nobody writes.

struct RowPipeline {
  const Rows& rows;

  DEVICE RowPipeline(const Rows& r, unsigned char*) : rows(r) {}
  DEVICE void start(const Schedule&) {}
  DEVICE void await() {}
  DEVICE void read(RowPacket (&x)[kRowsInFlight][kVectors],
                   RowPacket (&dy)[kRowsInFlight][kVectors], long long batch) {
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const long long row = row_of(batch, u);
      const bool valid = row < rows.count;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int column = rows.column(j);
        x[u][j] = dy[u][j] = RowPacket{};
        if (valid && rows.owns(j, column)) {
          x[u][j] = load_row<kVectorBytes>(rows.x(row, column));
          dy[u][j] = load_row<kVectorBytes>(rows.dy(row, column));
        }
      }
    }
  }
  DEVICE void read_residual(ResidualPacket (&residual)[kRowsInFlight][kVectors], long long batch) {
    constexpr int kChunk = kChunkOf<kResidualBytes>;
    constexpr int kStep = kChunk / static_cast<int>(sizeof(ResidualElement));
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const long long row = row_of(batch, u);
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int column = rows.column(j);
        residual[u][j] = ResidualPacket{};
        if (row >= rows.count || !rows.owns(j, column)) continue;
#pragma unroll
        for (int c = 0; c < kResidualBytes / kChunk; ++c)
          *reinterpret_cast<Packet<kChunk>*>(residual[u][j].words + c * kChunk / 4) =
              load_row<kChunk>(rows.dresidual(row, column) + c * kStep);
      }
    }
  }
  DEVICE void refill(const Schedule&) {}
  DEVICE void advance() {}
};
