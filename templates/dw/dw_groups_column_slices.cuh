// ---- Strategy `column_slices` on groups: arrive, then sum slices side by side ------------------
// As dw_column_slices.cuh, but the rows of the workspace are the sums of groups and runs (runs.cuh).
// All threads of a CTA write them before it arrives. last_arrived.cuh says who waits for whom, and why
// that ends.
//
// Memory ordering. The CTA barrier orders all threads' stores, including those of earlier rows, before
// thread 0's arrival. That is a release at gpu scope, which is cumulative, and every later entry is a
// read-modify-write that continues its release sequence. Thread 0 acquires the ledger after the last
// arrival, by a look or by the last arrival itself, and the CTA barrier extends that to its threads.
// Determinism class batch_invariant: the index of a row alone decides when it is added.
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
    cta_barrier();  // from here on, the tail may use all shared memory
    const unsigned places = load_shared_word(words + 1);
    unsigned place = load_shared_word(words);
#pragma unroll 1
    for (unsigned i = 0; i < places; ++i) {
      // As in last_arrived.cuh: words[0] has been read before a CTA barrier in the sum of a slice.
      if (i > 0) place = broadcast(smem, threadIdx.x == 0 ? take_over(i - 1) : 0);
#pragma unroll 1
      for (unsigned slice = place; slice < slices; slice += participants)
        sum_groups<kThreads, kTailColumns>(workspace, static_cast<int>(slice) * kTailColumns,
                                           columns, buffer, out);
    }
  }
};
