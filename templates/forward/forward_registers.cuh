// ---- Rows that stay in registers between the sum and the product --------------------------------

// A batch as it was loaded: kRowsInFlight rows, zeros past the end.
template <bool kResidual> struct Batch {
  RowPacket x[kRowsInFlight][kVectors];
  ResidualPacket residual[kResidual ? kRowsInFlight : 1][kResidual ? kVectors : 1];

  DEVICE void load(const Rows& rows, long long batch) {
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const long long row = batch * kRowsInFlight + u;
      const Element* from = rows.x_row(row);
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int column = rows.column(j);
        const bool valid = row < rows.count && rows.owns(column);
        x[u][j] = RowPacket{};
        if (valid) x[u][j] = load_row<kVectorBytes>(from + column);
        if constexpr (kResidual) {
          residual[u][j] = ResidualPacket{};
          if (valid)
            residual[u][j] =
                load_row<kVectorBytes>(rows.residual + row * rows.residual_stride + column);
        }
      }
    }
  }
};

template <bool kResidual> DEVICE void normalize(const Rows& rows, unsigned char* smem) {
  // All threads of the CTA run the same iterations, because they meet in shuffles and barriers.
  const long long step = static_cast<long long>(gridDim.x / kCluster) * kTeams;
  long long first = static_cast<long long>(blockIdx.x / kCluster) * kTeams;
  Batch<kResidual> next;
  next.load(rows, first + team_index());
  Packet<kWeightBytes> weights[kVectors];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int column = rows.column(j);
    weights[j] = Packet<kWeightBytes>{};
    if (rows.owns(column)) weights[j] = load_weights(rows.weight, column);
  }
  RowSum row_sum(smem);
  await_cluster();

  // Every CTA has a first batch.
  do {
    Batch<kResidual> now = next;
    if constexpr (kWalks && !kResidual) next.load(rows, first + step + team_index());
    const long long batch = first + team_index();
    float sum[kRowsInFlight] = {};
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const long long row = batch * kRowsInFlight + u;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        if constexpr (kResidual) {
          now.x[u][j] = add_residual(now.x[u][j], now.residual[u][j]);
          if (row < rows.count && rows.owns(rows.column(j)))
            store_row<kVectorBytes>(rows.residual_out + rows.place(row, rows.column(j)),
                                    now.x[u][j]);
        }
        sum[u] = add_squares(sum[u], now.x[u][j]);
      }
    }
    row_sum(sum);

#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const long long row = batch * kRowsInFlight + u;
      const float rstd = rows.rstd_of(sum[u]);
      if (row < rows.count && rows.first_column == 0 && team_thread() == 0)
        store_rstd(rows.rstd + row, rstd);
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int column = rows.column(j);
        if (row < rows.count && rows.owns(column))
          store_y<kVectorBytes>(rows.y + rows.place(row, column),
                                  scaled(now.x[u][j], rstd, weights[j], rows.offset));
      }
    }
    if constexpr (kWalks && kResidual) next.load(rows, first + step + team_index());
    first += step;
  } while (kWalks && first < rows.batches);
}
