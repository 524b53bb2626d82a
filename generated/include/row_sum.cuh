// ---- The sum over a row ----------------------------------------------------------------------

// A barrier of the threads of a team. Reads of a stage come before it, and the refill of the stage after
// it.
DEVICE void team_barrier() {
  if constexpr (kThreadsPerRow <= 32) {
    warp_barrier();
  } else if constexpr (kTeams == 1) {
    cta_barrier();
  } else {
    named_barrier(1 + team_index(), kThreadsPerRow);
  }
}

// The sum over the lanes of a warp that share a row, the same in each of them.
DEVICE float warp_sum(float value) {
#pragma unroll
  for (int mask = (kThreadsPerRow < 32 ? kThreadsPerRow : 32) / 2; mask > 0; mask /= 2)
    value = __fadd_rn(value, shuffle_xor(value, mask));
  return value;
}

// The sum of kCount floats of shared memory, the same in every thread of the warp: in index order if
// there are few, in a butterfly if there are many, after each lane has added every 32nd one.
template <int kCount> DEVICE float sum_shared(const float* from) {
  float total = 0.0f;
  if constexpr (kCount <= 8) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) total = __fadd_rn(total, load_shared(from + i));
  } else {
    for (int i = threadIdx.x % 32; i < kCount; i += 32)
      total = __fadd_rn(total, load_shared(from + i));
    total = warp_sum(total);
  }
  return total;
}
