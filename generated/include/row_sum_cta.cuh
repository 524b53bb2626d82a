// There are two buffers, used in turn. A warp that is ahead writes the next batch's sums while others
// still read this one's. The barrier in between keeps it from being two batches ahead.
struct RowSum {
  static constexpr int kSums = kRowsInFlight * kWarpsPerRow;

  float* sums;
  unsigned batch = 0;

  DEVICE explicit RowSum(unsigned char* smem)
      : sums(reinterpret_cast<float*>(smem + kSumsOffset) + team_index() * 2 * kSums) {}
  DEVICE void operator()(float (&value)[kRowsInFlight]) {
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) value[u] = warp_sum(value[u]);
    if constexpr (kWarpsPerRow == 1) {
      team_barrier();
    } else {
      float* into = sums + (batch & 1) * kSums;
      if (threadIdx.x % 32 == 0)
#pragma unroll
        for (int u = 0; u < kRowsInFlight; ++u)
          store_shared(into + u * kWarpsPerRow + team_thread() / 32, value[u]);
      team_barrier();
#pragma unroll
      for (int u = 0; u < kRowsInFlight; ++u)
        value[u] = sum_shared<kWarpsPerRow>(into + u * kWarpsPerRow);
      ++batch;
    }
  }
};
