// Rows of partials that are complete when they are summed.
struct CompleteRows {
  DEVICE static constexpr bool awaited() { return false; }
  DEVICE static float4 load(const float* from) { return load_workspace(from); }
};

// Sums kWidth columns from `first` over `count` rows of partials that are `stride` floats apart, with
// all kBlock threads of the CTA. Passes each column's total to `store(column, total)`.
// `Partials::load` loads four columns of a row. If rows have to be awaited, `await` gets the kAhead
// values that a thread has loaded, with the address of each (null past the last row), before they are
// added.
//
// The order is fixed:
//   - Lane l of kLanes takes rows l, l + kLanes, and so on. It adds kAhead rows at a time in pairs, and
//     these sums in index order.
//   - Lanes of one warp are added in a butterfly (where kQuads divides a warp).
//   - What is left is added in pairs, or in index order if there are more than kMostPaired, because the
//     pairs are unrolled.
template <int kBlock, int kWidth, typename Partials = CompleteRows, typename Store>
DEVICE void sum_slice(const float* partials, long long stride, unsigned count, int first,
                      int columns, float* buffer, Store store) {
  constexpr int kQuads = kWidth / 4;
  constexpr int kLanes = kBlock / kQuads;
  constexpr bool kShuffle = kQuads < 32 && 32 % kQuads == 0;
  constexpr int kRows = kShuffle ? kBlock / 32 : kLanes;
  constexpr int kAhead = 4;  // loads in flight per thread
  constexpr int kMostPaired = 64;
  static_assert(kLanes >= 1, "a slice is at most four columns per thread wide");

  const int lane = static_cast<int>(threadIdx.x) / kQuads;
  const int column = first + 4 * (static_cast<int>(threadIdx.x) % kQuads);
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (lane < kLanes && column < columns) {
#pragma unroll 1
    for (unsigned row = lane; row < count; row += kAhead * kLanes) {
      float4 ahead[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        ahead[a] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (row + a * kLanes < count)
          ahead[a] = Partials::load(partials + (row + a * kLanes) * stride + column);
      }
      if constexpr (Partials::awaited())
        Partials::await(ahead, [&](int a) {
          const float* place = partials + (row + a * kLanes) * stride + column;
          return row + a * kLanes < count ? place : nullptr;
        });
      sum = plus(sum, sum_in_pairs<0, kAhead>([&](int a) { return ahead[a]; }));
    }
  }
  if constexpr (kShuffle) {
#pragma unroll
    for (int mask = kQuads; mask < 32; mask *= 2)
      sum = plus(sum, make_float4(shuffle_xor(sum.x, mask), shuffle_xor(sum.y, mask),
                                  shuffle_xor(sum.z, mask), shuffle_xor(sum.w, mask)));
  }
  const int buffer_row = kShuffle ? static_cast<int>(threadIdx.x) / 32 : lane;
  if (lane < kLanes && (!kShuffle || threadIdx.x % 32 < kQuads))
    store_shared4(buffer + buffer_row * kWidth + 4 * (threadIdx.x % kQuads), sum);
  cta_barrier();
#pragma unroll
  for (int start = 0; start < kWidth; start += kBlock) {
    const int c = start + static_cast<int>(threadIdx.x);
    if (c >= kWidth || first + c >= columns) continue;
    if constexpr (kRows <= kMostPaired) {
      store(first + c, sum_in_pairs<0, kRows>(
                           [&](int r) { return load_shared(buffer + r * kWidth + c); }));
    } else {
      float total = load_shared(buffer + c);
#pragma unroll 16
      for (int r = 1; r < kRows; ++r)
        total = __fadd_rn(total, load_shared(buffer + r * kWidth + c));
      store(first + c, total);
    }
  }
  cta_barrier();  // the buffer may be used again
}
