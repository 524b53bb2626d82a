// ---- From the sums of groups and runs to dw ----------------------------------------------------
// The order is that of runs.cuh, whichever kernel adds, with whatever threads and slices.

// The workspace has a row for each unit, whole groups first.
struct GroupSums {
  const float* sums;
  long long stride;  // floats from one row to the next
  unsigned whole, rows;

  DEVICE unsigned groups() const {
    constexpr unsigned kRunsOfChunk = kRunsOfGroup * kGroupsOfChunk;
    const unsigned runs = rows - whole, last = runs % kRunsOfChunk;
    return whole + runs / kRunsOfChunk * kGroupsOfChunk +
           (last < kGroupsOfChunk ? last : kGroupsOfChunk);
  }
  // The sum of a group in four columns: its runs are added one after another.
  DEVICE float4 group(unsigned g, int column) const {
    if (g < whole) return load_workspace(sums + g * stride + column);
    const unsigned behind = g - whole;  // `whole` is a number of whole chunks
    const unsigned row = whole + behind / kGroupsOfChunk * (kRunsOfGroup * kGroupsOfChunk) +
                         behind % kGroupsOfChunk;
    float4 runs[kRunsOfGroup];
#pragma unroll
    for (int r = 0; r < kRunsOfGroup; ++r)
      if (row + r * kGroupsOfChunk < rows)
        runs[r] = load_workspace(sums + (row + r * kGroupsOfChunk) * stride + column);
#pragma unroll
    for (int r = 1; r < kRunsOfGroup; ++r)
      if (row + r * kGroupsOfChunk < rows) runs[0] = plus(runs[0], runs[r]);
    return runs[0];
  }
};

// The largest power of two that is no more than `count`.
DEVICE constexpr int power_below(int count) { return count < 2 ? count : 2 * power_below(count / 2); }

// How kBlock threads share the sums of kWidth columns: four columns per thread, and as many groups side
// by side as the threads allow.
template <int kBlock, int kWidth> struct Lanes {
  static constexpr int kQuads = kWidth / 4;
  static constexpr int kLanes = power_below(kBlock / kQuads);  // any other threads are idle
  static constexpr int kInWarp = kQuads < 32 ? 32 / kQuads : 1;  // lanes of a warp
  // Neighbouring groups of a chunk that a butterfly adds.
  static constexpr int kAbreast = kInWarp < kGroupsOfChunk ? kInWarp : kGroupsOfChunk;
  // Groups of a lane per round: at least whole chunks, and up to 8 if they fit into 32 KiB.
  static constexpr int kLeast = kGroupsOfChunk > kLanes ? kGroupsOfChunk / kLanes : 1;
  static constexpr int kRoom =
      power_below(kBlock < 256 * kAbreast ? 8 : 2048 * kAbreast / kBlock);
  static constexpr int kAhead = kLeast < kRoom ? kRoom : kLeast;
  static constexpr int kRound = kAhead * kLanes;  // groups of the CTA per round
  static_assert(kRound % kGroupsOfChunk == 0 && kLanes >= kAbreast, "whole chunks");
  static constexpr int kChunks = kRound / kGroupsOfChunk;
  static constexpr int kRows = kRound / kAbreast;  // sums left by the butterflies
  static constexpr int kRowsOfChunk = kGroupsOfChunk / kAbreast;
  static constexpr int kFloats = kRows * kWidth;  // of shared memory
};

// Sums kWidth columns from `first` with all kBlock threads of the CTA. If dw is to be added to, the
// chunks are added to it one after another. So the chunks of one call continue where those of another
// ended.
template <int kBlock, int kWidth>
DEVICE void sum_groups(const GroupSums& workspace, int first, int columns, float* buffer,
                       const DwOutput& out) {
  using Shape = Lanes<kBlock, kWidth>;
  constexpr int kTotals = (kWidth + kBlock - 1) / kBlock;
  const unsigned groups = workspace.groups();
  const unsigned end = (groups + kGroupsOfChunk - 1) / kGroupsOfChunk * kGroupsOfChunk;
  const unsigned lane = threadIdx.x / Shape::kQuads;
  const int quad = 4 * static_cast<int>(threadIdx.x % Shape::kQuads);
  const bool owns = lane < Shape::kLanes && first + quad < columns;
  // Adds the groups of the neighbouring lanes, of one chunk, in pairs.
  const auto keep = [&](int a, float4 sum) {
#pragma unroll
    for (int n = 1; n < Shape::kAbreast; n *= 2) {
      const int mask = n * Shape::kQuads;
      sum = plus(sum, make_float4(shuffle_xor(sum.x, mask), shuffle_xor(sum.y, mask),
                                  shuffle_xor(sum.z, mask), shuffle_xor(sum.w, mask)));
    }
    const unsigned row = (a * Shape::kLanes + lane) / Shape::kAbreast;
    if (lane < Shape::kLanes && lane % Shape::kAbreast == 0) store_shared4(buffer + row * kWidth + quad, sum);
  };
  float total[kTotals];
#pragma unroll
  for (int t = 0; t < kTotals; ++t) {
    const int c = t * kBlock + static_cast<int>(threadIdx.x);
    total[t] = 0.0f;
    if (out.mode == 2 && c < kWidth && first + c < columns)  // a -0 in the buffer counts as +0
      total[t] = __fadd_rn(0.0f, load_dw(static_cast<const float*>(out.base) + first + c));
  }
#pragma unroll 1
  for (unsigned round = 0; round < groups; round += Shape::kRound) {
    if (round + Shape::kRound <= workspace.whole) {
      float4 sums[Shape::kAhead];
#pragma unroll
      for (int a = 0; a < Shape::kAhead; ++a) {
        const unsigned g = round + a * Shape::kLanes + lane;
        sums[a] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (owns) sums[a] = load_workspace(workspace.sums + g * workspace.stride + first + quad);
      }
#pragma unroll
      for (int a = 0; a < Shape::kAhead; ++a) keep(a, sums[a]);
    } else {
      // Up to the end of the last chunk. Missing groups count as zeros.
#pragma unroll 1
      for (int a = 0; a < Shape::kAhead; ++a) {
        const unsigned g = round + a * Shape::kLanes + lane;
        if (g - lane >= end) break;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (owns && g < groups) sum = workspace.group(g, first + quad);
        keep(a, sum);
      }
    }
    cta_barrier();
    // A chunk's sum of one column is the work of one thread, which leaves it where the first row was.
#pragma unroll 1
    for (int i = threadIdx.x; i < Shape::kChunks * kWidth; i += kBlock) {
      float* const chunk = buffer + i / kWidth * (Shape::kRowsOfChunk * kWidth) + i % kWidth;
      if (round + i / kWidth * kGroupsOfChunk < groups)
        store_shared(chunk, sum_in_pairs<0, Shape::kRowsOfChunk>(
                                [&](int r) { return load_shared(chunk + r * kWidth); }));
    }
    cta_barrier();
#pragma unroll
    for (int t = 0; t < kTotals; ++t) {
      const int c = t * kBlock + static_cast<int>(threadIdx.x);
      if (c >= kWidth || first + c >= columns) continue;
#pragma unroll 4
      for (int chunk = 0; chunk < Shape::kChunks; ++chunk)
        if (round + chunk * kGroupsOfChunk < groups)
          total[t] = __fadd_rn(total[t],
                               load_shared(buffer + chunk * Shape::kRowsOfChunk * kWidth + c));
    }
    cta_barrier();  // the buffer is used again
  }
#pragma unroll
  for (int t = 0; t < kTotals; ++t) {
    const int c = t * kBlock + static_cast<int>(threadIdx.x);
    if (c >= kWidth || first + c >= columns) continue;
    if (out.mode == 2)
      store_dw(static_cast<float*>(out.base) + first + c, total[t]);
    else
      out.store(first + c, total[t]);
  }
}
