// Every team works on every participants * kTeams-th batch: nothing depends on timing.
struct Schedule {
  long long batch;  // the one that is due
  long long step;

  // The batch that comes `count` after it; past the end when it is no less than rows.batches.
  DEVICE long long ahead(int count) const { return batch + count * step; }
  DEVICE void next() { batch += step; }
};
