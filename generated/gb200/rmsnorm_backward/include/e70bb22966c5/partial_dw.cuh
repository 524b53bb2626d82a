// Adds the partial dw of the rows that a team works on side by side, by butterfly: one order, and all
// of their lanes have the same sum. Those of the first row store it.
DEVICE void add_abreast(float (&partial)[kVectors][kElements]) {
#pragma unroll
  for (int mask = kThreadsPerRow; mask < 32; mask *= 2)
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
#pragma unroll
      for (int i = 0; i < kElements; ++i)
        partial[j][i] = __fadd_rn(partial[j][i], shuffle_xor(partial[j][i], mask));
}

// Partial dw of every team, one row of kPartialStride floats each, in the memory of the stages: the
// rows are done, every bulk copy has been waited for, and a CTA barrier keeps teams that
// are ahead from writing into stages that others still read.
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

// The columns that a thread handles when the CTA passes over a row of partial dw: all its visits to
// a column are its own, so it may read back what it wrote.
template <typename Visit> DEVICE void for_each_quad(int columns, Visit visit) {
#pragma unroll 2
  for (int column = 4 * threadIdx.x; column < columns; column += 4 * kThreads) visit(column);
}

// Where dw goes and how: rounded once to the weight's dtype (0), as fp32 (1), or added to the fp32
// numbers that are there (2). Every element is stored by one thread, once.
struct DwOutput {
  void* base;
  int mode;

  DEVICE void store(int column, float value) const {
    if (mode == 0) {
      store_dw(static_cast<WeightElement*>(base) + column, value);
    } else {
      float* to = static_cast<float*>(base) + column;
      store_dw(to, mode == 1 ? value : __fadd_rn(load_dw(to), value));
    }
  }
  DEVICE void store4(int column, int columns, float4 value) const {
    store(column, value.x);
    if (column + 1 < columns) store(column + 1, value.y);
    if (column + 2 < columns) store(column + 2, value.z);
    if (column + 3 < columns) store(column + 3, value.w);
  }
  // The part of the columns from `first` on.
  DEVICE DwOutput from(int first) const {
    return {mode == 0 ? static_cast<void*>(static_cast<WeightElement*>(base) + first)
                      : static_cast<void*>(static_cast<float*>(base) + first),
            mode};
  }
};

// What every strategy is given. `columns` are this CTA's (a cluster splits a row by rank); each rank
// has its own counters and its own part of every workspace row, so ranks never meet.
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
  // Hands this CTA's partial dw to `store(place, four sums)`, the places from `own` on: straight from
  // the registers of a single team, through shared memory where several teams are added first.
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

// Hands a value of thread 0 to the whole CTA; the second barrier keeps a next call from overwriting
// the word before everyone has read it.
DEVICE unsigned broadcast(unsigned char* smem, unsigned value) {
  unsigned* word = reinterpret_cast<unsigned*>(smem + kBroadcastOffset);
  if (threadIdx.x == 0) store_shared_word(word, value);
  cta_barrier();
  value = load_shared_word(word);
  cta_barrier();
  return value;
}
