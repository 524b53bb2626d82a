// Every team works on every participants * kTeams-th batch: nothing depends on timing.
struct Schedule {
  long long batch;  // the one that is due
  long long step;

  // The batch that comes `count` after it; past the end when it is no less than rows.batches.
  DEVICE long long ahead(int count) const { return batch + count * step; }
  DEVICE void next() { batch += step; }
  DEVICE static long long end(long long rows) { return (rows + kBatchRows - 1) / kBatchRows; }
};

// A batch is kBatchRows consecutive rows.
DEVICE constexpr int row_step() { return 1; }
DEVICE long long row_of(const long long& batch, const int& u) {
  return batch * kBatchRows + u * kRowsAbreast + row_abreast();
}
