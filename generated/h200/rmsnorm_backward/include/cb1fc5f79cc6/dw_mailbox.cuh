// ---- Strategy `mailbox`: partial dw that tells by itself that it has arrived --------------------
// Every CTA sends its partial dw to its row of a workspace that holds zeros, as words whose bits are
// never all 0. The last to arrive (last_arrived.cuh says who waits for whom and why that ends) receive
// slices of kTailColumns columns of all rows: they ask for each word until its bits are not all 0, empty
// its place, and add in the fixed order of sum_slice. So no release has to wait until the words have
// reached the L2. (Collective libraries know this as their low-latency protocol: data that is its own
// flag.)
//
// Order of memory: none between words is needed, since each is looked at for itself. A word that is
// not 0 was sent in this launch: whatever used the workspace before left it 0, and this grid starts
// after the end of that one. A vector access is four accesses of one word each, relaxed at gpu scope,
// hence morally strong: a thread that has seen a word does not see its place empty before it empties
// it (coherence of reads), and its 0 comes after the word it has seen (coherence of read and write).
// Each word has one sender, which writes it once, and one receiver in a launch, so nothing touches its
// place after that.
//
// The ledger tells who waits and that a CTA may wait. That all have arrived is a hint here, which
// keeps thousands of threads from asking for words long before they are sent (without it the kernel is
// 0.4 to 2.5 us slower): no word is taken for arrived because of it. So a CTA may as well arrive early,
// when it begins its last rows, and read the ledger's answer when it has sent its words: it goes on to
// send them without waiting for any other CTA (of its own cluster, as last_arrived.cuh says), which is
// all that those who wait rely on.
// Places and ledger are 0 before the first launch and after each.
// Determinism class gpu_to_gpu: who sums depends on timing, the order of the sum does not.

// A zero travels as -0. Adding that instead of +0 changes no sum that starts at +0: rounded to
// nearest, such a sum is never -0, whichever of its terms are added first among themselves.
DEVICE float message(float value) { return value == 0.0f ? -0.0f : value; }
DEVICE bool arrived(float4 v) {
  return __float_as_uint(v.x) != 0 && __float_as_uint(v.y) != 0 && __float_as_uint(v.z) != 0 &&
         __float_as_uint(v.w) != 0;
}

// Rows that are asked for until they have arrived, those of a thread side by side.
struct ArrivingRows {
  DEVICE static constexpr bool awaited() { return true; }
  DEVICE static float4 load(const float* from) { return receive_words(from); }
  template <int kCount, typename Place>
  DEVICE static void await(float4 (&rows)[kCount], Place place) {
    bool missing;
    do {
      missing = false;
#pragma unroll
      for (int a = 0; a < kCount; ++a)
        if (place(a) && !arrived(rows[a])) rows[a] = receive_words(place(a));
#pragma unroll
      for (int a = 0; a < kCount; ++a) missing |= place(a) && !arrived(rows[a]);
    } while (missing);
#pragma unroll
    for (int a = 0; a < kCount; ++a)
      if (place(a)) empty_words(const_cast<float*>(place(a)));
  }
};

struct DwStrategy : LastArrived {
  Ledger before_arrival = 0;  // thread 0's

  // Arrives early. A team calls it before its last batch; the first team does the arriving, since no
  // CTA is launched whose first team has no batch (plan_launch in generator/runtime/spec.py). One that
  // never arrived would keep all others waiting.
  DEVICE void announce(unsigned participant) {
    if (threadIdx.x == 0 && output.base != nullptr)
      before_arrival = book_and_read_later(ledger(), arrival(participant));
  }
  DEVICE void finish(const Rows& rows, const float (&partial)[kVectors][kElements],
                     unsigned participant) const {
    float* places = zeroed + rank * kPartialStride;
    each_partial(places + participant * kRowStride, rows, partial, [](float* to, float4 sums) {
      send_words(to, make_float4(message(sums.x), message(sums.y), message(sums.z),
                                 message(sums.w)));
    });
    finish_slices<ArrivingRows>(
        participant, places,
        [&](Ledger* ledger, Ledger entry) {
          return kArrivesEarly ? before_arrival : book_and_read(ledger, entry);
        },
        [](const Ledger* ledger) { return read_relaxed(ledger); });
  }
};
