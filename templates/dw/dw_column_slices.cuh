// ---- Strategy `column_slices`: arrive, then sum slices side by side ---------------------------
// Every CTA stores its partial dw in the workspace and arrives at the ledger. The last CTAs to arrive
// sum slices of kTailColumns columns over all rows, in the order of sum_slice. last_arrived.cuh says
// who waits for whom, and why that ends.
//
// Memory ordering. The CTA barrier orders all threads' stores before thread 0's arrival. That is a
// release at gpu scope, which is cumulative, and every later entry is a read-modify-write that
// continues its release sequence. Thread 0 acquires the ledger after the last arrival, by a look or by
// the last arrival itself, and the CTA barrier extends that to its threads.
// Determinism class gpu_to_gpu: timing decides who sums, but not the order of the sum.
struct DwStrategy : LastArrived {
  DEVICE void finish(const Rows& rows, const float (&partial)[kVectors][kElements],
                     unsigned participant) const {
    store_row_of(participant, rows, partial);
    finish_slices<CompleteRows>(
        participant, row(0),
        [](Ledger* ledger, Ledger entry) { return book_in_order(ledger, entry); },
        [](const Ledger* ledger) { return read_acquire(ledger); });
  }
};
