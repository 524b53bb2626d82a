// ---- Runs and groups of rows --------------------------------------------------------------------
// Here the order in which rows are added depends on the rows alone, not on the grid:
//   strip  kTeams consecutive rows, one for every team of a CTA;
//   chunk  kChunkRows consecutive rows;
//   group  every kGroupsOfChunk-th strip of a chunk, kGroupRows rows in all;
//   run    kRunRows of them, in successive strips.
// In a run every team adds its rows one after another; then the sums of the teams are added in pairs.
// The runs of a group are added one after another, the groups of a chunk in pairs and pairs of pairs,
// and the chunks one after another (sum_groups.cuh).
//
// A unit is a whole group or a single run. A CTA works on every participants-th unit and leaves its sum
// in the workspace. The groups of the first chunks are left as a whole, `args.group` of them; runs of
// the rest let all CTAs end at about the same time. Neither that number nor the grid changes a bit.
// Neighbouring CTAs work on neighbouring strips, so the rows that are read at one time lie close
// together in memory.

constexpr int kRunsOfGroup = kGroupRows / kRunRows;

// How the rows of a call are divided into units: whole groups, then runs.
struct Units {
  static constexpr long long kSlabRows = kGroupsOfChunk * kRunRows;  // of runs side by side

  unsigned whole;  // groups
  long long rows;

  // Runs are numbered by slabs, so those that exist come first.
  DEVICE unsigned count() const {
    const long long rest = rows - static_cast<long long>(whole) * kGroupRows;
    const long long last = rest % kSlabRows / kTeams + (rest % kSlabRows % kTeams != 0);
    return whole + static_cast<unsigned>(rest / kSlabRows * kGroupsOfChunk +
                                         (last < kGroupsOfChunk ? last : kGroupsOfChunk));
  }
  DEVICE long long first_row(unsigned unit) const {
    const unsigned run = unit - whole;
    return unit < whole
               ? static_cast<long long>(unit / kGroupsOfChunk) * kChunkRows +
                     unit % kGroupsOfChunk * kTeams
               : static_cast<long long>(whole) * kGroupRows +
                     static_cast<long long>(run / kGroupsOfChunk) * kSlabRows +
                     run % kGroupsOfChunk * kTeams;
  }
};

// The batches of a team, through all units of its CTA.
struct Schedule {
  static constexpr int kStep = kBatchRows * row_step();  // rows from one batch to the next
  static constexpr unsigned kRunBatches = kRunRows / (kTeams * kBatchRows);
  static constexpr long long kNone = 1ll << 62;        // behind the last batch
  static_assert(kRunRows % (kTeams * kBatchRows) == 0 && kGroupRows % kRunRows == 0, "whole batches");

  Units units;
  unsigned step, count, unit;
  unsigned left;    // batches of the unit, with the one that is due
  long long batch;  // that is due

  // More than the number of any batch. Every unit has a batch for every team, if need be one without a
  // row: the teams of a CTA meet at the end of every run.
  DEVICE static long long end(long long rows) {
    return (rows + Units::kSlabRows - 1) / Units::kSlabRows * Units::kSlabRows;
  }
  DEVICE Schedule(long long rows, unsigned whole, unsigned first, unsigned every)
      : units{whole, rows}, step(every), count(units.count()), unit(first) {
    enter(unit, left, batch);
  }
  DEVICE void enter(unsigned u, unsigned& batches, long long& row) const {
    batches = kRunBatches;
    row = kNone;
    if (u >= count) return;
    row = units.first_row(u) + team_index();
    if (u < units.whole) {
      batches = kRunBatches * kRunsOfGroup;
    } else {
      const long long full = row + static_cast<long long>(kRunBatches - 1) * kStep;
      if (full >= units.rows)
        batches = row < units.rows
                      ? static_cast<unsigned>((units.rows - row + kStep - 1) / kStep) : 1;
    }
  }
  // The batch that comes `n` after the one that is due.
  DEVICE long long ahead(unsigned n) const {
    if (n < left) return batch + static_cast<long long>(n) * kStep;
    unsigned u = unit, batches = left;
    long long row = batch;
    do {
      n -= batches;
      u += step;
      enter(u, batches, row);
    } while (n >= batches && row != kNone);
    return row == kNone ? kNone : row + static_cast<long long>(n) * kStep;
  }
  DEVICE void next() {
    batch += kStep;
    if (--left == 0) enter(unit += step, left, batch);
  }

  DEVICE bool ends_run() const { return (left - 1) % kRunBatches == 0; }
  DEVICE bool in_first_run() const {
    return unit >= units.whole || left > kRunBatches * (kRunsOfGroup - 1);
  }
  DEVICE bool ends_unit() const { return left == 1; }
};

// The sum of a group's runs so far, in shared memory that no bulk copy touches.
struct RunSums {
  static constexpr int kQuads = kVectors * kElements / 4;  // four columns each

  float* sums;

  DEVICE RunSums(unsigned char* smem)
      : sums(reinterpret_cast<float*>(smem + kBlockSumsOffset)) {}
  // Of a team's thread of the same place: four floats, without bank conflicts.
  DEVICE float* place(int quad, unsigned team) const {
    return sums + (quad * kThreads + team * kTeamThreads + team_thread()) * 4;
  }
  // Of the sum over teams; behind the places of all.
  DEVICE float* total(int quad) const {
    if constexpr (kTeams == 1) return place(quad, 0);
    return sums + (kQuads * kThreads + quad * kTeamThreads + team_thread()) * 4;
  }
  // Adds a run, which `partial` is of this thread's team, to those before it in the group. The last
  // one of a unit: the sum goes `to` a row of the workspace.
  DEVICE void end_run(const float (&partial)[kVectors][kElements], const Rows& rows, bool first,
                      bool last, float* to) const {
    if constexpr (kTeams > 1) {
      cta_barrier();  // every team has read the places of the run before this one
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad)
        store_shared4(place(quad, team_index()), quad_of(partial, quad));
      cta_barrier();
    }
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      if (quad % kTeams != team_index()) continue;  // the teams share the columns
      float4 sum = quad_of(partial, quad);
      if constexpr (kTeams > 1)
        sum = sum_in_pairs<0, kTeams>([&](int team) { return load_shared4(place(quad, team)); });
      if (!first) sum = plus(load_shared4(total(quad)), sum);
      if (!last) {
        store_shared4(total(quad), sum);
      } else {
        const int vector = quad / (kElements / 4), column = rows.column(vector);
        if (row_abreast() == 0 && rows.owns(vector, column))
          store_workspace(to + column - rows.first_column + quad % (kElements / 4) * 4, sum);
      }
    }
  }
  DEVICE static float4 quad_of(const float (&partial)[kVectors][kElements], int quad) {
    const float* four = &partial[quad / (kElements / 4)][quad % (kElements / 4) * 4];
    return make_float4(four[0], four[1], four[2], four[3]);
  }
};
