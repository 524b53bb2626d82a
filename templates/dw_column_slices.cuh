// ---- Strategy `column_slices`: arrive, then sum slices side by side ---------------------------
// Every CTA leaves its partial dw in the workspace and arrives at a counter. The first few CTAs (one
// per slice of kTailColumns columns) wait until all have arrived and sum their slices over all
// rows in index order; the others leave at once.
//
// Progress: waiting CTAs wait for CTAs with larger indices, so all must be able to run at the same
// time. The tuner admits only grids that fit the device, and the kernel is launched cooperatively:
// the driver starts it only when the whole grid can be resident, and refuses it otherwise.
// Order of memory: the CTA barrier orders all threads' stores before thread 0's arrival (release at
// gpu scope, cumulative; each arrival continues the release sequences of those before it). The
// waiting thread 0 acquires the counter after the last arrival, and the CTA barrier hands that to
// its threads.
// Counter: it is 0 before the first arrival and after the last, which wraps it. Only a thread
// that has arrived itself looks at it: by coherence it then sees its own arrival or a later one, so a
// 0 is the last one's. Nobody changes the counter after that in this launch, and nothing is left to
// set back.
// Determinism class gpu_to_gpu: one order of adds, by index.
struct DwStrategy : DwContext {
  DEVICE unsigned begin() const { return blockIdx.x / kCluster; }
  DEVICE void finish(const Rows& rows, const float (&partial)[kVectors][kElements],
                     unsigned participant) const {
    store_row_of(participant, rows, partial);
    unsigned* arrivals = counters + rank;
    const unsigned slices = (columns + kTailColumns - 1) / kTailColumns;
    const bool waits = participant < slices;
    cta_barrier();
    if (threadIdx.x == 0) {
      arrive(arrivals, participants);
      if (waits)
        while (load_acquire(arrivals) != 0) {
        }
    }
    if (!waits) return;
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
