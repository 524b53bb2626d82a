// What every strategy can use. `columns` counts this CTA's columns (a cluster splits a row by rank).
// Each rank has its own counters and its own part of every workspace row, so ranks never meet.
struct DwContext {
  DwOutput output;
  unsigned* counters;
  float* zeroed;
  float* scratch;
  unsigned participants, group;
  int columns, rank;
  unsigned char* smem;

  DEVICE DwOutput own_dw() const { return output.from(rank * kColumns); }
  // Row `index` of the workspace, from this CTA's first column.
  DEVICE float* row(unsigned index) const {
    return scratch + (static_cast<long long>(index) * kCluster + rank) * kPartialStride;
  }
  // Passes this CTA's partial dw to `store(address, four sums)`, with addresses from `own` on: directly
  // from the registers of a single team, or through shared memory if several teams are added first.
  template <typename Store>
  DEVICE void each_partial(float* own, const Rows& rows,
                           const float (&partial)[kVectors][kElements], Store store) const {
    if constexpr (kTeams == 1 && kElements % 4 == 0) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int column = rows.column(j);
        if (row_abreast() != 0 || !rows.owns(j, column)) continue;
#pragma unroll
        for (int i = 0; i < kElements; i += 4)
          store(own + column - rows.first_column + i,
                make_float4(partial[j][i], partial[j][i + 1], partial[j][i + 2],
                            partial[j][i + 3]));
      }
    } else {
      const float* teams = store_partials(smem, rows, partial);
      for_each_quad(columns, [&](int column) { store(own + column, cta_partial(teams, column)); });
    }
  }
  // The same to workspace row `index`.
  DEVICE void store_row_of(unsigned index, const Rows& rows,
                           const float (&partial)[kVectors][kElements]) const {
    each_partial(row(index), rows, partial,
                 [](float* to, float4 sums) { store_workspace(to, sums); });
  }
};

// Broadcasts a value of thread 0 to the whole CTA. The second barrier keeps the next call from
// overwriting the word before everyone has read it.
DEVICE unsigned broadcast(unsigned char* smem, unsigned value) {
  unsigned* word = reinterpret_cast<unsigned*>(smem + kBroadcastOffset);
  if (threadIdx.x == 0) store_shared_word(word, value);
  cta_barrier();
  value = load_shared_word(word);
  cta_barrier();
  return value;
}
