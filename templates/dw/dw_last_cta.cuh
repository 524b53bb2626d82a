// ---- Strategy `last_cta`: the last CTA to finish sums -----------------------------------------
// Every CTA stores its partial dw in the workspace and draws a ticket. The CTA with the last ticket
// sums all rows, in the order of sum_slice. With two levels, the last CTA of each group sums its group,
// and the last of these sums the groups. No CTA ever waits.
//
// Memory ordering. The CTA barrier orders all threads' stores before thread 0's ticket, which is an
// acquire-release at gpu scope. The last ticket acquires the releases of all other CTAs, and the
// barrier in `broadcast` extends that to the threads. Only the CTA with the last ticket touches a full
// counter, and resets it.
// Determinism class gpu_to_gpu: timing decides who sums, but not the order of the sum.
struct DwStrategy : DwContext {
  DEVICE unsigned begin() const { return blockIdx.x / kCluster; }
  // True for the CTA that completes `count` arrivals.
  DEVICE bool last_of(unsigned* counter, unsigned count) const {
    cta_barrier();
    unsigned ticket = 0;
    if (threadIdx.x == 0) {
      ticket = take_ticket(counter);
      if (ticket + 1 == count) store_relaxed(counter, 0);
    }
    return broadcast(smem, ticket) + 1 == count;
  }
  template <typename Store>
  DEVICE void sum_rows(unsigned first_row, unsigned count, Store store) const {
    float* buffer = reinterpret_cast<float*>(smem + kTilesOffset);
    for (int first = 0; first < columns; first += kTailColumns)
      sum_slice<kThreads, kTailColumns>(row(first_row),
                                        static_cast<long long>(kCluster) * kPartialStride, count,
                                        first, columns, buffer, store);
  }
  DEVICE void finish(const Rows& rows, const float (&partial)[kVectors][kElements],
                     unsigned participant) const {
    store_row_of(participant, rows, partial);
    const unsigned groups = (participants + group - 1) / group;
    const unsigned g = participant / group;
    const unsigned size = min(group, participants - g * group);
    unsigned* arrivals = counters + rank * (groups + 1);
    if (!last_of(arrivals + g, size)) return;
    const DwOutput out = own_dw();
    const auto to_dw = [&](int column, float total) { out.store(column, total); };
    if constexpr (kLevels == 1) {
      sum_rows(0, participants, to_dw);
    } else {
      float* sums = row(participants + g);
      // The next level reads whole float4s. Sums of their padding columns are never stored.
      sum_rows(g * group, size, [&](int column, float total) {
        store_workspace_word(sums + column, total);
      });
      if (!last_of(arrivals + groups, groups)) return;
      sum_rows(participants, groups, to_dw);
    }
  }
};
