// Each team takes every (participants * kTeams)-th batch. Nothing depends on timing.
struct Schedule {
  long long batch;  // the one that is due
  long long step;

  // The batch `count` steps later; past the end if it is not below rows.batches.
  DEVICE long long ahead(int count) const { return batch + count * step; }
  DEVICE void next() { batch += step; }
};
