// ---- Numbers of rows --------------------------------------------------------------------------
// Numbers such as rstd. Each lane of a warp holds that of one row of the team's next kHeldBatches batches,
// and has asked for one of the batches behind them. So most batches cost a shuffle and no load, which may
// take as long as a batch.
struct RowNumbers {
  static constexpr int kHeldBatches = 32 / kRowsInFlight;
  static_assert(32 % kRowsInFlight == 0, "the rows of a batch are held by neighbouring lanes");

  const float* numbers;
  long long count, batch, step;  // batch: the first one of which nothing was asked for yet
  int taken = 0;
  float held, coming;

  DEVICE RowNumbers(const float* of, const Schedule& schedule, long long rows)
      : numbers(of), count(rows), batch(schedule.batch), step(schedule.step), held(load()),
        coming(load()) {}
  // 0 for rows past the end.
  DEVICE float load() {
    const int lane = threadIdx.x % 32;
    const long long row = row_of(batch + lane / kRowsInFlight * step, lane % kRowsInFlight);
    batch += kHeldBatches * step;
    return row < count ? load_rstd(numbers + row) : 0.0f;
  }
  // Those of the next batch.
  DEVICE void take(float (&into)[kRowsInFlight]) {
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u)
      into[u] = shuffle_from(held, taken * kRowsInFlight + u);
    if (++taken < kHeldBatches) return;
    taken = 0;
    held = coming;
    coming = load();
  }
};
