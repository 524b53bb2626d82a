// ---- Rows in tiles of 1024 columns, as vLLM's Triton kernel has them -----------------------------
// A CTA of 128 threads, so of four warps, takes a row. Of every tile a thread has 8 elements, in runs of
// 16 bytes. It adds up their squares (`sum_of_squares`), the lanes of a warp add theirs in a butterfly,
// and then the warps do. The sums of tiles are added one after another.

constexpr int kOfThread = 8;  // elements of a tile
constexpr int kTileColumns = kOfThread * kThreads;
constexpr int kRun = 16 / sizeof(Element);

struct Tiles : Rows {
  DEVICE explicit Tiles(const Rows& rows) : Rows(rows) {}
  DEVICE int column(int begin, int vector) const {
    const int run = vector * kElements / kRun, inside = vector * kElements % kRun;
    return begin + (run * kThreads + static_cast<int>(threadIdx.x)) * kRun + inside;
  }
  // ptxas contracts the last step of the division with the addition of eps.
  DEVICE float rstd_of(float sum) const {
    const float reciprocal = approximate_reciprocal(static_cast<float>(columns));
    return approximate_ratio(1.0f, approximate_root(__fmaf_rn(reciprocal, sum, eps)));
  }
};

template <bool kResidual, typename Use>
DEVICE void along(const Tiles& rows, long long row, Use use) {
  const Element* from = rows.x_row(row);
  for (int begin = 0; begin < rows.columns; begin += kTileColumns) {
    RowPacket x[kVectors];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int column = rows.column(begin, j);
      x[j] = RowPacket{};
      if (column < rows.columns) {
        x[j] = load_row<kVectorBytes>(from + column);
        if constexpr (kResidual)
          x[j] = add_residual(x[j], load_row<kVectorBytes>(
                                        rows.residual + row * rows.residual_stride + column));
      }
    }
    use(begin, x);
  }
}

// The same in all threads. `sums` has room for one float of each warp, twice: a warp that is ahead
// writes the next tile's while others still read this one's, and the barrier keeps it from being two
// tiles ahead.
DEVICE float sum_of_tile(const RowPacket (&x)[kVectors], float* sums) {
  float values[kOfThread];
#pragma unroll
  for (int i = 0; i < kOfThread; ++i)
    values[i] = element<Element>(x[i / kElements].words, i % kElements);
  const float sum = warp_sum(sum_of_squares(values));
  if (threadIdx.x % 32 == 0) store_shared(sums + threadIdx.x / 32, sum);
  cta_barrier();
  return __fadd_rn(__fadd_rn(load_shared(sums), load_shared(sums + 2)),
                   __fadd_rn(load_shared(sums + 1), load_shared(sums + 3)));
}

template <bool kResidual> DEVICE void normalize(const Rows& all, unsigned char* smem) {
  const Tiles rows(all);
  const long long row = blockIdx.x;
  float* sums = reinterpret_cast<float*>(smem + kSumsOffset);
  float sum = 0.0f;
  along<kResidual>(rows, row, [&](int begin, const RowPacket (&x)[kVectors]) {
    if constexpr (kResidual) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j)
        if (const int column = rows.column(begin, j); column < rows.columns)
          store_row<kVectorBytes>(rows.residual_out + rows.place(row, column), x[j]);
    }
    sum = __fadd_rn(sum, sum_of_tile(x, sums + begin / kTileColumns % 2 * kWarpsPerRow));
  });
  const float rstd = rows.rstd_of(sum);
  if (threadIdx.x == 0) store_rstd(rows.rstd + row, rstd);
  along<kResidual>(rows, row, [&](int begin, const RowPacket (&x)[kVectors]) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int column = rows.column(begin, j);
      if (column < rows.columns)
        store_y<kVectorBytes>(rows.y + rows.place(row, column),
                                scaled(x[j], rstd, load_weights(rows.weight, column), rows.offset));
    }
  });
}
