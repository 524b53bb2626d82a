// ---- Strategy `column_slices` on groups: arrive, then sum slices side by side ------------------
// As dw_column_slices.cuh, but the rows of the workspace are the sums of groups and runs (runs.cuh),
// written by all threads of a CTA before it arrives; last_arrived.cuh says who waits for whom and why
// that ends.
//
// Order of memory: the CTA barrier orders all threads' stores, those of earlier rows included,
// before thread 0's arrival (release at gpu scope, cumulative; every later entry is a
// read-modify-write and continues its release sequence). Thread 0 acquires the ledger after the last
// arrival, by a look or by the last arrival itself, and the CTA barrier hands that to its threads.
// Determinism class batch_invariant: the order of adds follows from the number of the row.
struct DwStrategy : LastArrived {
  DEVICE void finish(const Rows& rows, const float (&)[kVectors][kElements],
                     unsigned participant) const {
    const unsigned slices = (columns + kTailColumns - 1) / kTailColumns;
    const GroupSums workspace{row(0), kRowStride, group, Units{group, static_cast<unsigned>(rows.count)}.count()};
    unsigned* words = reinterpret_cast<unsigned*>(smem + kBroadcastOffset);
    float* buffer = reinterpret_cast<float*>(smem + kTilesOffset);
    const DwOutput out = own_dw();
    cta_barrier();
    if (threadIdx.x == 0) {
      const Ledger before = book_in_order(ledger(), arrival(participant));
      const unsigned own = participants - 1 - arrivals(before);
      unsigned places = 0;
      if (own == 0)
        places = 1 + handed_over(before);
      else if (own < slices && await(own, [](const Ledger* at) { return read_acquire(at); }))
        places = 1;
      store_shared_word(words, own);
      store_shared_word(words + 1, places);
    }
    cta_barrier();  // behind it, shared memory is the tail's as well
    const unsigned places = load_shared_word(words + 1);
    unsigned place = load_shared_word(words);
#pragma unroll 1
    for (unsigned i = 0; i < places; ++i) {
      if (i > 0) place = broadcast(smem, threadIdx.x == 0 ? take_over(i - 1) : 0);
#pragma unroll 1
      for (unsigned slice = place; slice < slices; slice += participants)
        sum_groups<kThreads, kTailColumns>(workspace, static_cast<int>(slice) * kTailColumns,
                                           columns, buffer, out);
    }
  }
};
