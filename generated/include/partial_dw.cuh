// Adds the partial dw of the rows that a team works on side by side, in a butterfly. That is one order,
// and gives all their lanes the same sum. The lanes of the first row store it.
DEVICE void add_abreast(float (&partial)[kVectors][kElements]) {
#pragma unroll
  for (int mask = kThreadsPerRow; mask < 32; mask *= 2)
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
#pragma unroll
      for (int i = 0; i < kElements; ++i)
        partial[j][i] = __fadd_rn(partial[j][i], shuffle_xor(partial[j][i], mask));
}

// Stores the partial dw of every team, one row of kPartialStride floats each, in the memory of the
// stages. All rows are done and all bulk copies have been waited for. A CTA barrier keeps teams that are
// ahead from writing into stages that others still read.
DEVICE float* store_partials(unsigned char* smem, const Rows& rows,
                             const float (&partial)[kVectors][kElements]) {
  float* teams = reinterpret_cast<float*>(smem + kTilesOffset);
  float* own = teams + team_index() * kPartialStride;
  const int columns = kExact ? kColumns : rows.columns;
  cta_barrier();
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int column = rows.column(j) - rows.first_column;
    if (row_abreast() != 0 || !rows.owns(j, rows.column(j))) continue;
    if constexpr (kElements % 4 == 0) {
#pragma unroll
      for (int i = 0; i < kElements; i += 4)
        store_shared4(own + column + i, make_float4(partial[j][i], partial[j][i + 1],
                                                    partial[j][i + 2], partial[j][i + 3]));
    } else {
#pragma unroll
      for (int i = 0; i < kElements; ++i) store_shared(own + column + i, partial[j][i]);
    }
  }
  // Up to three floats of padding, so that whole float4s can be read.
  const int padded = columns + static_cast<int>(team_thread());
  if (padded < (columns + 3) / 4 * 4) store_shared(own + padded, 0.0f);
  cta_barrier();
  return teams;
}

// The CTA's partial dw of four columns: the teams' in pairs.
DEVICE float4 cta_partial(const float* teams, int column) {
  return sum_in_pairs<0, kTeams>(
      [&](int t) { return load_shared4(teams + t * kPartialStride + column); });
}

// Visits the thread's columns of a row of partial dw, four at a time. A column always belongs to the
// same thread, so a thread can read back what it wrote.
template <typename Visit> DEVICE void for_each_quad(int columns, Visit visit) {
#pragma unroll 2
  for (int column = 4 * threadIdx.x; column < columns; column += 4 * kThreads) visit(column);
}
