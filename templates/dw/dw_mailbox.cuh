// ---- Strategy `mailbox`: each word of partial dw is its own arrival flag -------------------------
// Every CTA sends its partial dw to its row of a workspace that holds zeros, as words whose bits are
// never all 0. The last CTAs to arrive (last_arrived.cuh says who waits for whom, and why that ends)
// receive slices of kTailColumns columns of all rows. They poll each word until its bits are not all 0,
// reset it to 0, and add in the fixed order of sum_slice. So no release has to wait until the words
// have reached the L2. (Collective libraries call this a low-latency protocol.)
//
// Memory ordering. No order between words is needed, because each is checked by itself. A word that is
// not 0 was sent in this launch: whatever used the workspace before left it 0, and this grid starts
// after that one has ended. A vector access is four accesses of one word each, relaxed at gpu scope,
// hence morally strong. A thread that has seen a word cannot later read the 0 from before it (coherence
// of reads), and the 0 that it writes follows the word that it has seen (coherence of read and write).
// In a launch each word has one sender, which writes it once, and one receiver. So nothing touches a word
// after its receiver has emptied it.
//
// The ledger decides who waits, and when a CTA may keep waiting. "All have arrived" is only a hint
// here. It keeps thousands of threads from polling words long before they are sent (without it the
// kernel is 0.4 to 2.5 us slower). No word counts as arrived because of it. So a CTA can arrive early,
// when it begins its last rows, and use the ledger's answer after it has sent its words. Those who
// wait rely only on this: a CTA that has arrived sends its words without waiting for any CTA outside
// its cluster. The words and the ledger are 0 before the first launch and after each.
// Determinism class gpu_to_gpu: timing decides who sums, but not the order of the sum.

// A zero is sent as -0. Adding -0 instead of +0 changes no sum that starts at +0: when rounding to
// nearest, such a sum is never -0, in whatever order its terms are added.
DEVICE float message(float value) { return value == 0.0f ? -0.0f : value; }
DEVICE bool arrived(float4 v) {
  return __float_as_uint(v.x) != 0 && __float_as_uint(v.y) != 0 && __float_as_uint(v.z) != 0 &&
         __float_as_uint(v.w) != 0;
}

// Rows that a thread polls until they have arrived, several at a time.
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

  // Arrives early. Every team calls this before its last batch, and the first team does the arriving.
  // It always has a batch (plan_launch in normforge/spec.py launches no CTA without one). A
  // CTA that never arrived would keep all others waiting.
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
