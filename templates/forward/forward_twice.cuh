// ---- Rows that are read twice: once for the sum, once more, mostly from the L2, for the product ---
// A CTA goes along one row in steps of kVectors vectors per thread, so a row may have any length. With a
// residual, the second pass reads and adds both inputs again: what this kernel has written must not be
// read back through the read-only path.

template <bool kResidual, typename Use> DEVICE void along(const Rows& rows, long long row, Use use) {
  const Element* from = rows.x_row(row);
  for (int begin = 0; begin < rows.columns; begin += kVectors * kThreads * kElements) {
    RowPacket x[kVectors];
    ResidualPacket residual[kVectors];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int column = begin + rows.column(j);
      x[j] = RowPacket{};
      residual[j] = ResidualPacket{};
      if (column < rows.columns) {
        x[j] = load_row<kVectorBytes>(from + column);
        if constexpr (kResidual)
          residual[j] = load_row<kVectorBytes>(rows.residual + row * rows.residual_stride + column);
      }
    }
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      if constexpr (kResidual) x[j] = add_residual(x[j], residual[j]);
    use(begin, x);
  }
}

template <bool kResidual> DEVICE void normalize(const Rows& rows, unsigned char* smem) {
  RowSum row_sum(smem);
  long long row = blockIdx.x;
  do {
    float sum[1] = {0.0f};
    along<kResidual>(rows, row, [&](int begin, const RowPacket (&x)[kVectors]) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int column = begin + rows.column(j);
        if constexpr (kResidual)
          if (column < rows.columns)
            store_row<kVectorBytes>(rows.residual_out + rows.place(row, column), x[j]);
        sum[0] = add_squares(sum[0], x[j]);
      }
    });
    row_sum(sum);
    const float rstd = rows.rstd_of(sum[0]);
    if (threadIdx.x == 0) store_rstd(rows.rstd + row, rstd);
    along<kResidual>(rows, row, [&](int begin, const RowPacket (&x)[kVectors]) {
      Packet<kWeightBytes> weights[kVectors];
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int column = begin + rows.column(j);
        weights[j] = Packet<kWeightBytes>{};
        if (column < rows.columns) weights[j] = load_weights(rows.weight, column);
      }
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int column = begin + rows.column(j);
        if (column < rows.columns)
          store_y<kVectorBytes>(rows.y + rows.place(row, column),
                                  scaled(x[j], rstd, weights[j], rows.offset));
      }
    });
    row += gridDim.x;
  } while (kWalks && row < rows.count);
}
