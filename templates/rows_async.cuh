// ---- Rows: cp.async into stages in shared memory ---------------------------------------------
// A thread copies exactly the vectors that it reads, so waiting for its own groups is all the
// synchronisation there is. One group is committed for every batch, empty ones past the end
// included, so that "all but the newest kStages - 1" always names the batch that is due.
// A slot is refilled by the very thread that read it, and an asynchronous copy comes after the
// instructions before it in its own thread (PTX ISA, asynchronous operations).

struct RowPipeline {
  static constexpr int kTileBytes = kVectors * kThreads * kVectorBytes;  // one row of every team

  const Rows& rows;
  unsigned char* tiles;
  int stage = 0;

  DEVICE RowPipeline(const Rows& r, unsigned char* smem) : rows(r), tiles(smem + kTilesOffset) {}

  // Vectors of consecutive threads are neighbours: no bank conflicts.
  DEVICE unsigned char* slot(int in_stage, int tensor, int u, int j) const {
    return tiles + ((in_stage * 2 + tensor) * kRowsInFlight + u) * kTileBytes +
           (j * kThreads + threadIdx.x) * kVectorBytes;
  }
  DEVICE void fetch(long long batch, int into) {
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const long long row = batch * kRowsInFlight + u;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int column = rows.column(j);
        if (row < rows.count && rows.owns(column)) {
          copy_async<kVectorBytes>(slot(into, 0, u, j), rows.x + row * rows.x_stride + column);
          copy_async<kVectorBytes>(slot(into, 1, u, j), rows.dy + row * rows.dy_stride + column);
        }
      }
    }
    copy_async_commit();
  }
  DEVICE void start(long long first, long long step) {
#pragma unroll
    for (int s = 0; s < kStages - kReload; ++s) fetch(first + s * step, s);
  }
  DEVICE void await() { copy_async_wait<kStages - 1 - kReload>(); }
  DEVICE void read(RowPacket (&x)[kRowsInFlight][kVectors],
                   RowPacket (&dy)[kRowsInFlight][kVectors], long long batch) {
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const bool valid = batch * kRowsInFlight + u < rows.count;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        x[u][j] = dy[u][j] = RowPacket{};
        if (valid && rows.owns(rows.column(j))) {
          x[u][j] = load_shared_packet<kVectorBytes>(slot(stage, 0, u, j));
          dy[u][j] = load_shared_packet<kVectorBytes>(slot(stage, 1, u, j));
        }
      }
    }
  }
  // With a reload the stage of this batch is still needed: the one before it is refilled.
  DEVICE void refill(long long batch, long long step) {
    const int last = stage == 0 ? kStages - 1 : stage - 1;
    fetch(batch + (kStages - kReload) * step, kReload ? last : stage);
  }
  DEVICE void advance() { stage = stage + 1 == kStages ? 0 : stage + 1; }
};
