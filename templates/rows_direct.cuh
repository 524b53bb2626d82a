// ---- Rows: plain vector loads into registers -------------------------------------------------

struct RowPipeline {
  const Rows& rows;

  DEVICE RowPipeline(const Rows& r, unsigned char*) : rows(r) {}
  DEVICE void start(long long, long long) {}
  DEVICE void await() {}
  DEVICE void read(RowPacket (&x)[kRowsInFlight][kVectors],
                   RowPacket (&dy)[kRowsInFlight][kVectors], long long batch) {
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const long long row = batch * kRowsInFlight + u;
      const bool valid = row < rows.count;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int column = rows.column(j);
        x[u][j] = dy[u][j] = RowPacket{};
        if (valid && rows.owns(column)) {
          x[u][j] = load_row<kVectorBytes>(rows.x + row * rows.x_stride + column);
          dy[u][j] = load_row<kVectorBytes>(rows.dy + row * rows.dy_stride + column);
        }
      }
    }
  }
  DEVICE void refill(long long, long long) {}
  DEVICE void advance() {}
};
