// ---- The last to arrive sum ---------------------------------------------------------------------
// A CTA's place follows from the order of arrivals: 0 for the last one, 1 for the one before it, and so
// on. The columns are divided into slices, slice s for place s (modulo the number of CTAs). A CTA that
// has a slice waits until all CTAs have arrived and sums it; the others leave at once.
//
// Progress, whatever the grid and the number of CTAs that the device holds at once: nobody waits
// without end for a CTA that might never run. The last to arrive waits for no arrival. Another waits
// on when it has seen that all have started, because a CTA that has started goes on running and
// arrives without waiting for any other; but for those of its cluster, which run at the same time and
// send it all sums of their rows before they come here. Until it has seen that, it looks kPatience
// times; then it hands its slices over to the last to arrive, and leaves, which gives its room on the
// device to others; those that find an entry of this kind do so at once.
//
// The ledger of a rank is one 64-bit word, so that all agree on the order of its entries:
//   bits 0 to 19   starts
//   bits 20 to 39  arrivals
//   bits 44 to 63  places handed over
// The arrival of participant 0 takes off what all starts and arrivals add up to, so that they end at
// 0, from which the next launch begins. Bits 40 to 43 tell whether it has done so: what is left in
// bits 0 to 43 is then negative, or 0 when all have arrived. Only a CTA that has arrived itself looks
// at the ledger, so that it never takes the 0 before the first start for the one after the last
// arrival (coherence: it sees its own arrival or a later entry).
//
// Handing over: an entry before the last arrival is read with it by the last to arrive, and each of
// them has the number of those before it: its place in a list. The last to arrive waits for the word
// in the list, which follows without waiting for anyone. An entry after the last arrival is void: its
// CTA reads so, takes it back and sums its slices itself. So each slice is summed by one CTA. The words
// of the list are data in themselves and relaxed; who reads one sets it back to 0 and takes the entry
// back. That orders nothing: the next launch begins after the end of this one (it is not launched as a
// programmatic dependent, and lets none of its own start early; a programmatic dependent that runs in
// between must wait for its primary).
struct LastArrived : DwContext {
  static constexpr Ledger kStart = 1, kArrival = 1ull << 20, kSign = 1ull << 43,
                          kHandover = 1ull << 44;
  static constexpr unsigned kPatience = 64;  // looks, some tens of microseconds
  static constexpr int kSlices = (kColumns + kTailColumns - 1) / kTailColumns;
  // Floats from one row of the workspace to the next.
  static constexpr long long kRowStride = static_cast<long long>(kCluster) * kPartialStride;
  // 32-bit words of one rank: the ledger, then the list; whole lines of 128 bytes.
  static constexpr int kLedgerWords = (2 + kSlices + 31) / 32 * 32;

  DEVICE unsigned begin() const {
    if (output.base != nullptr && threadIdx.x == 0) book_relaxed(ledger(), kStart);
    return blockIdx.x / kCluster;
  }
  DEVICE Ledger* ledger() const {
    return reinterpret_cast<Ledger*>(counters + rank * kLedgerWords);
  }
  DEVICE unsigned* list() const { return counters + rank * kLedgerWords + 2; }
  DEVICE Ledger whole() const { return participants * (kStart + kArrival); }
  DEVICE Ledger arrival(unsigned participant) const {
    return participant == 0 ? kArrival - whole() : kArrival;
  }
  DEVICE static bool complete(Ledger seen) { return (seen & (kHandover - 1)) == 0; }
  // The entries of a ledger that is not complete, without what participant 0 has taken off.
  DEVICE Ledger entries(Ledger seen) const { return seen & kSign ? seen + whole() : seen; }
  DEVICE unsigned starts(Ledger seen) const {
    return static_cast<unsigned>(entries(seen) & (kArrival - 1));
  }
  DEVICE unsigned arrivals(Ledger seen) const {
    return static_cast<unsigned>(entries(seen) / kArrival & (kArrival - 1));
  }
  DEVICE unsigned handed_over(Ledger seen) const {
    return static_cast<unsigned>(entries(seen) / kHandover);
  }

  // Thread 0 of a CTA that has arrived. False when it has handed over its slices.
  template <typename Look> DEVICE bool await(unsigned place, Look look) const {
    unsigned looks = 0;
    while (true) {
      const Ledger seen = look(ledger());
      if (complete(seen)) return true;
      if (starts(seen) == participants) continue;
      if (handed_over(seen) == 0 && ++looks < kPatience) continue;
      const Ledger before = book_and_read(ledger(), kHandover);
      if (!complete(before)) {
        store_relaxed(list() + handed_over(before), place + 1);
        return false;
      }
      book_relaxed(ledger(), 0 - kHandover);
    }
  }
  // Thread 0 of the last to arrive: the place that entry `index` of the list hands over.
  DEVICE unsigned take_over(unsigned index) const {
    unsigned entry;
    while ((entry = load_relaxed(list() + index)) == 0) {
    }
    store_relaxed(list() + index, 0);
    book_relaxed(ledger(), 0 - kHandover);
    return entry - 1;
  }
  // Arrives by `arrive(ledger, entry)`, which gives what the ledger said before, waits by
  // `look(ledger)`, and sums its slices of `partials`, rows of all participants. `arrive` is called
  // behind the partial dw of all threads of the CTA; one that has arrived before gives what it has
  // read then.
  template <typename Partials, typename Arrive, typename Look>
  DEVICE void finish_slices(unsigned participant, const float* partials, Arrive arrive,
                            Look look) const {
    const unsigned slices = (columns + kTailColumns - 1) / kTailColumns;
    unsigned* words = reinterpret_cast<unsigned*>(smem + kBroadcastOffset);
    float* buffer = reinterpret_cast<float*>(smem + kTilesOffset);
    const DwOutput out = own_dw();
    cta_barrier();
    if (threadIdx.x == 0) {
      const Ledger before = arrive(ledger(), arrival(participant));
      const unsigned own = participants - 1 - arrivals(before);
      unsigned places = 0;
      if (own == 0)
        places = 1 + handed_over(before);
      else if (own < slices && await(own, look))
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
        sum_slice<kThreads, kTailColumns, Partials>(
            partials, kRowStride, participants, static_cast<int>(slice) * kTailColumns, columns,
            buffer, [&](int column, float total) { out.store(column, total); });
    }
  }
};
