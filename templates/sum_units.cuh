// ---- From the sums of units to dw --------------------------------------------------------------
// The order is that of runs.cuh, whatever the kernel that adds, its threads and its slices.

constexpr int kUnitsOfGroup = kGroupRows / kUnitRows;
constexpr int kGroupsOfChunk = kChunkRows / kGroupRows;
static_assert((kGroupsOfChunk & (kGroupsOfChunk - 1)) == 0, "groups are added in pairs");

// How kBlock threads share the sums of kWidth columns: four columns to a thread, and as many groups
// side by side as there are threads for.
template <int kBlock, int kWidth> struct UnitSums {
  static constexpr int kQuads = kWidth / 4;
  static constexpr int kLanes = kBlock / kQuads;
  static_assert((kLanes & (kLanes - 1)) == 0 && kLanes * kQuads == kBlock, "a lane for each group");
  static constexpr int kInWarp = kQuads < 32 ? 32 / kQuads : 1;  // lanes of a warp
  // Groups that a butterfly adds, neighbours in a chunk.
  static constexpr int kAbreast = kInWarp < kGroupsOfChunk ? kInWarp : kGroupsOfChunk;
  // Groups that a thread has under way: whole chunks at least.
  static constexpr int kLeast = kGroupsOfChunk > kLanes ? kGroupsOfChunk / kLanes : 1;
  static constexpr int kAhead = kUnitsOfGroup == 1 && kLeast < 8 ? 8 : kLeast;
  static constexpr int kRound = kAhead * kLanes;          // groups of the CTA
  static constexpr int kRows = kRound / kAbreast;         // what the butterflies leave of them
  static constexpr int kRowsOfChunk = kGroupsOfChunk / kAbreast;
  static constexpr int kFloats = kRows * kWidth;          // of shared memory
};

// The sum of one group in four columns: that of its units, one after another. `from` is the first of
// them; there are `left` in the workspace, one at least.
DEVICE float4 group_sum(const float* from, long long stride, unsigned left) {
  float4 units[kUnitsOfGroup];
#pragma unroll
  for (int u = 0; u < kUnitsOfGroup; ++u)
    if (u < left) units[u] = load_workspace(from + u * stride);
#pragma unroll
  for (int u = 1; u < kUnitsOfGroup; ++u)
    if (u < left) units[0] = plus(units[0], units[u]);
  return units[0];
}

// Sums kWidth columns from `first` over the `units` of a workspace whose rows lie `stride` floats
// apart, with all kBlock threads of the CTA. Added to the dw that is there, a chunk after another,
// where that is wanted: so the chunks of one call go on where those of another have ended.
template <int kBlock, int kWidth>
DEVICE void sum_units(const float* workspace, long long stride, unsigned units, int first,
                      int columns, float* buffer, const DwOutput& out) {
  using Shape = UnitSums<kBlock, kWidth>;
  constexpr int kTotals = (kWidth + kBlock - 1) / kBlock;
  const unsigned groups = (units + kUnitsOfGroup - 1) / kUnitsOfGroup;
  const unsigned lane = threadIdx.x / Shape::kQuads;
  const int quad = 4 * static_cast<int>(threadIdx.x % Shape::kQuads);
  const bool owns = first + quad < columns;
  float total[kTotals];
#pragma unroll
  for (int t = 0; t < kTotals; ++t) {
    const int c = t * kBlock + static_cast<int>(threadIdx.x);
    total[t] = 0.0f;
    if (out.mode == 2 && c < kWidth && first + c < columns)
      total[t] = load_dw(static_cast<const float*>(out.base) + first + c);
  }
#pragma unroll 1
  for (unsigned round = 0; round < groups; round += Shape::kRound) {
    float4 sums[Shape::kAhead];
#pragma unroll
    for (int a = 0; a < Shape::kAhead; ++a) {
      const unsigned group = round + a * Shape::kLanes + lane;
      const unsigned unit = group * kUnitsOfGroup;
      sums[a] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (owns && group < groups)
        sums[a] = group_sum(workspace + unit * stride + first + quad, stride, units - unit);
    }
#pragma unroll
    for (int a = 0; a < Shape::kAhead; ++a) {
#pragma unroll
      for (int n = 1; n < Shape::kAbreast; n *= 2) {
        const int mask = n * Shape::kQuads;
        sums[a] = plus(sums[a], make_float4(shuffle_xor(sums[a].x, mask),
                                            shuffle_xor(sums[a].y, mask),
                                            shuffle_xor(sums[a].z, mask),
                                            shuffle_xor(sums[a].w, mask)));
      }
      const unsigned row = (a * Shape::kLanes + lane) / Shape::kAbreast;
      if (lane % Shape::kAbreast == 0) store_shared4(buffer + row * kWidth + quad, sums[a]);
    }
    cta_barrier();
#pragma unroll
    for (int t = 0; t < kTotals; ++t) {
      const int c = t * kBlock + static_cast<int>(threadIdx.x);
      if (c >= kWidth || first + c >= columns) continue;
#pragma unroll
      for (int row = 0; row < Shape::kRows; row += Shape::kRowsOfChunk)
        if (round + row * Shape::kAbreast < groups)
          total[t] = __fadd_rn(total[t], sum_in_pairs<0, Shape::kRowsOfChunk>([&](int r) {
                                 return load_shared(buffer + (row + r) * kWidth + c);
                               }));
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

// The workspace has a row for every unit. It is written during the rows, by the threads that own the
// columns, straight from their registers.
DEVICE void store_unit(float* to, const Rows& rows, const float (&partial)[kVectors][kElements]) {
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int column = rows.column(j);
    if (row_abreast() != 0 || !rows.owns(j, column)) continue;
#pragma unroll
    for (int i = 0; i < kElements; i += 4)
      store_workspace(to + column - rows.first_column + i,
                      make_float4(partial[j][i], partial[j][i + 1], partial[j][i + 2],
                                  partial[j][i + 3]));
  }
}
DEVICE unsigned units_of(long long rows) {
  return static_cast<unsigned>((rows + kUnitRows - 1) / kUnitRows);
}
