// ---- The last CTAs to arrive sum ----------------------------------------------------------------
// The order of arrivals gives each CTA a place: 0 for the last to arrive, 1 for the one before it, and
// so on. The columns are divided into slices, slice s for place s modulo the number of participants. A
// CTA that has a slice waits until all CTAs have arrived, and sums it. The others leave at once. (With
// clusters each rank has a ledger of its own, and the CTAs meant here are those of one rank.)
//
// Progress. No CTA waits forever for one that might never run, whatever the grid and however many
// CTAs the device holds at once:
//   - The last CTA to arrive waits for no arrival.
//   - Any other CTA keeps waiting once it has seen that all have started. A CTA that has started keeps
//     running, and arrives without waiting for any other, except for those of its cluster. These run
//     at the same time, and send it all sums of their rows before they come here.
//   - Until it has seen that, it looks at most kPatience times. Then it hands its slices over to the
//     last CTA to arrive and leaves, which frees its room on the device. A CTA that finds that another
//     has handed over does so at once.
//
// The ledger of a rank is one 64-bit word, so that all CTAs agree on the order of its entries:
//   bits 0 to 19   starts
//   bits 20 to 39  arrivals
//   bits 44 to 63  CTAs that have handed over their place
// The arrival of participant 0 also subtracts the final total of starts and arrivals. So these fields
// end at 0, where the next launch begins. Bit 43 (kSign) tells whether it has done so: until all have
// arrived, bits 0 to 43 are then negative, and have borrowed 1 from the bits above them, which is why
// those are read through `entries` (for fewer than 2^20 participants); afterwards they are 0. Only a CTA
// that has itself arrived looks at the ledger, so it never mistakes the 0 before the first start for the
// 0 after the last arrival (coherence: it sees its own arrival or a later entry).
//
// Handing over. The last CTA to arrive reads, with its own arrival, how many CTAs handed over before
// it. Each of these got the number of those before it, which is its position in a list. It writes its
// place there without waiting for anyone, and the last CTA waits for that word. A hand-over that comes
// after the last arrival is void: its CTA sees this, takes the entry back and sums its slices itself.
// So exactly one CTA sums each slice. The words of the list carry their own data, so relaxed accesses
// suffice. Whoever reads a word sets it back to 0 and takes the entry back. This needs no order,
// because the next launch begins after the end of this one. (It is not launched as a programmatic
// dependent, and this one lets no dependent start early. A programmatic dependent of another kernel on
// the stream must wait for its primary before it touches the workspace.)
struct LastArrived : DwContext {
  static constexpr Ledger kStart = 1, kArrival = 1ull << 20, kSign = 1ull << 43,
                          kHandover = 1ull << 44;
  static constexpr unsigned kPatience = 64;  // looks, which take some tens of microseconds
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
  // The entries of a ledger that is not complete, with participant 0's subtraction undone.
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

  // For thread 0 of a CTA that has arrived. True once all have arrived; false if it has handed over its
  // slices.
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
  // For thread 0 of the last CTA to arrive: the place that entry `index` of the list hands over.
  DEVICE unsigned take_over(unsigned index) const {
    unsigned entry;
    while ((entry = load_relaxed(list() + index)) == 0) {
    }
    store_relaxed(list() + index, 0);
    book_relaxed(ledger(), 0 - kHandover);
    return entry - 1;
  }
  // Arrives with `arrive(ledger, entry)`, which returns what the ledger held before. Waits with
  // `look(ledger)`, which reads it. Then sums its slices over `partials`, the rows of all
  // participants. `arrive` is called after all threads of the CTA have written their partial dw. If
  // the CTA has arrived earlier, `arrive` returns what was read then.
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
    cta_barrier();  // from here on, the tail may use all shared memory
    const unsigned places = load_shared_word(words + 1);
    unsigned place = load_shared_word(words);
#pragma unroll 1
    for (unsigned i = 0; i < places; ++i) {
      // Overwrites words[0]. All threads have read it: only place 0 has more than one place, and the
      // sum of its first slice ends in a CTA barrier.
      if (i > 0) place = broadcast(smem, threadIdx.x == 0 ? take_over(i - 1) : 0);
#pragma unroll 1
      for (unsigned slice = place; slice < slices; slice += participants)
        sum_slice<kThreads, kTailColumns, Partials>(
            partials, kRowStride, participants, static_cast<int>(slice) * kTailColumns, columns,
            buffer, [&](int column, float total) { out.store(column, total); });
    }
  }
};
