// ---- Rows of a group by bulk copies ------------------------------------------------------------
// As rows_bulk.cuh, but the rows of a batch are row_step() rows apart. A batch without rows is fetched
// as well: nothing is copied, and its barrier completes. It begins less than row_step() rows past the end
// (Units::batches), so `left` is never negative.
struct GroupPipeline : RowPipeline {
  DEVICE GroupPipeline(const Rows& r, unsigned char* smem) : RowPipeline(r, smem) {}

  DEVICE void fetch(long long batch, int into) {
    if (batch >= rows.batches) return;
    const long long row = row_of(batch, 0);
    const long long left = (rows.count - row + row_step() - 1) / row_step();
    const int valid = left < kRowsInFlight ? static_cast<int>(left) : kRowsInFlight;
    unsigned char* tile = tiles + into * kBatchBytes;
    mbarrier_expect(&landed[into], valid * (2 * kRowBytes + kResidualRowBytes));
    for (int u = 0; u < valid; ++u) {
      const long long from = row + u * row_step();
      bulk_load(tile + u * kRowBytes, rows.x(from, rows.first_column), kRowBytes, &landed[into]);
      bulk_load(tile + (kRowsInFlight + u) * kRowBytes, rows.dy(from, rows.first_column), kRowBytes,
                &landed[into]);
      if constexpr (kResidual)
        bulk_load(tile + 2 * kRowsInFlight * kRowBytes + u * kResidualRowBytes,
                  rows.dresidual(from, rows.first_column), kResidualRowBytes, &landed[into]);
    }
  }
  DEVICE void start(const Schedule& schedule) {
    if (team_thread() != 0) return;
#pragma unroll 1
    for (int s = 0; s < kAhead; ++s) fetch(schedule.ahead(s), s);
  }
  DEVICE void refill(const Schedule& schedule) {
    if (team_thread() != 0) return;
    fence_async_shared();
    const int last = stage == 0 ? kStages - 1 : stage - 1;
    fetch(schedule.ahead(kAhead), kReload ? last : stage);
  }
};
