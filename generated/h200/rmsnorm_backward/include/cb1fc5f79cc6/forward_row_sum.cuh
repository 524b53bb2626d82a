// Rows of less than a warp, of one and of several warps of a CTA. All threads of a CTA go round the
// loop over batches together, so the barrier is the CTA's: one with a number per team would take all
// sixteen that a CTA can have, and with them the room of other CTAs on the SM.
// Two buffers, used in turn: a warp that is ahead writes the next batch's sums while others still
// read this one's, and cannot be two batches ahead because of the barrier between.
struct RowSum {
  static constexpr int kSums = kRowsInFlight * kWarpsPerRow;

  float* sums;
  unsigned batch = 0;

  DEVICE explicit RowSum(unsigned char* smem)
      : sums(reinterpret_cast<float*>(smem + kSumsOffset) + team_index() * 2 * kSums) {}
  DEVICE void operator()(float (&value)[kRowsInFlight]) {
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) value[u] = warp_sum(value[u]);
    if constexpr (kWarpsPerRow > 1) {
      float* into = sums + (batch & 1) * kSums;
      if (threadIdx.x % 32 == 0)
#pragma unroll
        for (int u = 0; u < kRowsInFlight; ++u)
          store_shared(into + u * kWarpsPerRow + team_thread() / 32, value[u]);
      cta_barrier();
#pragma unroll
      for (int u = 0; u < kRowsInFlight; ++u)
        value[u] = sum_shared<kWarpsPerRow>(into + u * kWarpsPerRow);
      ++batch;
    }
  }
};
