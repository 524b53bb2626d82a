// ---- Strategy `column_slices`: arrive, then sum slices side by side ---------------------------
// Every CTA leaves its partial dw in the workspace and arrives at a counter. The first few CTAs (one
// per slice of kTailColumns columns) wait until all have arrived and sum their slices over all
// rows in index order; the others leave at once.
//
// Progress: waiting CTAs wait for CTAs with larger indices, so all must be able to run at the same
// time. The tuner admits only grids that fit the device, and the kernel is launched cooperatively:
// the driver starts it only when the whole grid can be resident, and refuses it otherwise.
// Order of memory: the CTA barrier orders all threads' stores before thread 0's arrival (release at
// gpu scope, cumulative); the waiting thread 0 acquires the full count, and the CTA barrier hands
// that to its threads. Counters: a waiting CTA departs after its last look at the arrivals, and the
// last to depart sets both counters back.
// Determinism class gpu_to_gpu: one order of adds, by index.
struct DwStrategy : DwContext {
  DEVICE unsigned begin() const { return blockIdx.x / kCluster; }
  DEVICE void finish(const Rows& rows, const float (&partial)[kVectors][kElements],
                     unsigned participant) const {
    store_row_of(participant, rows, partial);
    unsigned* arrivals = counters + 2 * rank;
    unsigned* departures = arrivals + 1;
    const unsigned slices = (columns + kTailColumns - 1) / kTailColumns;
    const unsigned waiting = min(slices, participants);
    cta_barrier();
    if (threadIdx.x == 0) {
      add_release(arrivals);
      if (participant < waiting) {
        while (load_acquire(arrivals) != participants) {
        }
        if (take_ticket(departures) + 1 == waiting) {
          store_counter(arrivals, 0);
          store_counter(departures, 0);
        }
      }
    }
    if (participant >= waiting) return;
    cta_barrier();  // behind it, shared memory is the tail's as well
    float* buffer = reinterpret_cast<float*>(smem + kTilesOffset);
    const DwOutput out = own_dw();
    for (unsigned slice = participant; slice < slices; slice += participants)
      sum_slice<kThreads, kTailColumns>(
          row(0), static_cast<long long>(kCluster) * kPartialStride, participants,
          static_cast<int>(slice) * kTailColumns, columns, buffer,
          [&](int column, float total) { out.store(column, total); });
  }
};
