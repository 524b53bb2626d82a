// ---- Rows: bulk copies into stages in shared memory ------------------------------------------
// One thread of each team asks the copy engine for whole rows. Each stage has a transaction barrier,
// which completes when all bytes of the batch have landed, and acquires them for every thread that
// waits.
// A stage is refilled only after every thread of the team has read it. That is after the barrier of the
// row sum or, in a cluster, after the completed exchange, which every warp of the team joins after its
// reads (with a reload, the exchange of the next batch). The barrier orders ordinary accesses. The
// proxy fence of the thread that issues the copy orders them before the asynchronous write.
// Only existing rows are copied. The space of the others holds old data, which is never read.
// dx may be the memory of dy: one copy brings a row, or a CTA's columns of it, and every thread that
// writes there has waited for its completion, which the mbarrier makes visible to generic accesses.

struct RowPipeline {
  static_assert(kRowsAbreast == 1, "a bulk copy brings its row to a whole team");
  static constexpr int kBatchBytes = kRowsInFlight * (2 * kRowBytes + kResidualRowBytes);
  static constexpr int kAhead = kStages - kReload;

  const Rows& rows;
  unsigned char* tiles;
  unsigned long long* landed;  // one barrier per stage
  int stage = 0;
  unsigned phase = 0;

  DEVICE RowPipeline(const Rows& r, unsigned char* smem)
      : rows(r), tiles(smem + kTilesOffset + team_index() * kStages * kBatchBytes),
        landed(reinterpret_cast<unsigned long long*>(smem) + team_index() * kStages) {
    if (team_thread() == 0) {
#pragma unroll 1
      for (int s = 0; s < kStages; ++s) mbarrier_init(&landed[s], 1);
      mbarrier_init_fence();
    }
    // A barrier before the first wait publishes them to the team.
  }
  DEVICE void fetch(long long batch, int into) {
    if (batch >= rows.batches) return;
    const long long row = row_of(batch, 0);
    const long long left = rows.count - row;
    const int valid = left < kRowsInFlight ? static_cast<int>(left) : kRowsInFlight;
    unsigned char* tile = tiles + into * kBatchBytes;
    mbarrier_expect(&landed[into], valid * (2 * kRowBytes + kResidualRowBytes));
    for (int u = 0; u < valid; ++u) {
      bulk_load(tile + u * kRowBytes, rows.x(row + u, rows.first_column), kRowBytes,
                &landed[into]);
      bulk_load(tile + (kRowsInFlight + u) * kRowBytes, rows.dy(row + u, rows.first_column),
                kRowBytes, &landed[into]);
      if constexpr (kResidual)
        bulk_load(tile + 2 * kRowsInFlight * kRowBytes + u * kResidualRowBytes,
                  rows.dresidual(row + u, rows.first_column), kResidualRowBytes, &landed[into]);
    }
  }
  DEVICE void start(const Schedule& schedule) {
    if (team_thread() != 0) return;
#pragma unroll 1
    for (int s = 0; s < kAhead; ++s) fetch(schedule.ahead(s), s);
  }
  DEVICE void await() { mbarrier_wait(&landed[stage], phase); }
  DEVICE void read(RowPacket (&x)[kRowsInFlight][kVectors],
                   RowPacket (&dy)[kRowsInFlight][kVectors], long long batch) {
    const unsigned char* tile = tiles + stage * kBatchBytes;
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const bool valid = row_of(batch, u) < rows.count;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int column = rows.column(j);
        const int at = (column - rows.first_column) * static_cast<int>(sizeof(Element));
        x[u][j] = dy[u][j] = RowPacket{};
        if (valid && rows.owns(j, column)) {
          x[u][j] = load_shared_packet<kVectorBytes>(tile + u * kRowBytes + at);
          dy[u][j] = load_shared_packet<kVectorBytes>(tile + (kRowsInFlight + u) * kRowBytes + at);
        }
      }
    }
  }
  DEVICE void read_residual(ResidualPacket (&residual)[kRowsInFlight][kVectors], long long batch) {
    const unsigned char* tile = tiles + stage * kBatchBytes + 2 * kRowsInFlight * kRowBytes;
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const bool valid = row_of(batch, u) < rows.count;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int column = rows.column(j);
        const unsigned char* from =
            tile + u * kResidualRowBytes +
            (column - rows.first_column) * static_cast<int>(sizeof(ResidualElement));
        residual[u][j] = ResidualPacket{};
        if (valid && rows.owns(j, column))
          residual[u][j] = gather_chunks([&](int c) { return from + 16 * c; });
      }
    }
  }
  // With a reload, the stage of this batch is still needed, so the one before it is refilled.
  DEVICE void refill(const Schedule& schedule) {
    if (team_thread() != 0) return;
    fence_async_shared();
    const int last = stage == 0 ? kStages - 1 : stage - 1;
    fetch(schedule.ahead(kAhead), kReload ? last : stage);
  }
  DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};
