// ---- Runs and groups of rows --------------------------------------------------------------------
// Here the order in which rows are added depends only on the rows, not on the grid:
//   strip  kTeams consecutive rows, one for each team of a CTA;
//   chunk  kChunkRows consecutive rows;
//   group  every kGroupsOfChunk-th strip of a chunk, kGroupRows rows in all;
//   run    kRunRows rows of a group, in successive strips.
// In a run, each team adds its rows one after another. (Where parts of a warp work on rows side by
// side, each part does so, and then the parts are added in pairs.) Then the sums of the teams are added
// in pairs. The runs of a group are added one after another, the groups of a chunk in pairs and pairs
// of pairs, and the chunks one after another (sum_groups.cuh).
//
// A unit is a whole group or a single run. Each CTA takes every participants-th unit and stores its sum
// in the workspace. The first `args.group` groups are stored whole. The rest is stored as runs, so that
// all CTAs end at about the same time. Neither that number nor the grid changes a bit.
// Neighbouring CTAs work on neighbouring strips, so the rows being read at any time are close together
// in memory.

constexpr int kRunsOfGroup = kGroupRows / kRunRows;

// How the rows of a call, fewer than 2^31, are divided into units: first whole groups, then runs. Runs
// are numbered slab by slab, so that existing ones come first.
struct Units {
  static constexpr unsigned kSlabRows = kGroupsOfChunk * kRunRows;  // of runs side by side
  static constexpr unsigned kStep = kBatchRows * row_step();        // rows from one batch to the next
  static constexpr unsigned kRunBatches = kRunRows / (kTeams * kBatchRows);
  static_assert(kRunRows % (kTeams * kBatchRows) == 0 && kGroupRows % kRunRows == 0, "whole batches");

  unsigned whole;  // groups
  unsigned rows;

  DEVICE unsigned in_runs() const { return rows - whole * kGroupRows; }
  DEVICE unsigned in_full_slabs() const { return whole + in_runs() / kSlabRows * kGroupsOfChunk; }
  DEVICE unsigned count() const {
    const unsigned last = (in_runs() % kSlabRows + kTeams - 1) / kTeams;
    return in_full_slabs() + (last < kGroupsOfChunk ? last : kGroupsOfChunk);
  }
  DEVICE unsigned first_row(unsigned unit) const {
    if (unit < whole)
      return unit / kGroupsOfChunk * kChunkRows + unit % kGroupsOfChunk * kTeams;
    const unsigned run = unit - whole;
    return whole * kGroupRows + run / kGroupsOfChunk * kSlabRows + run % kGroupsOfChunk * kTeams;
  }
  // Of each team. The last slab has fewer, and the last batch may have no row.
  DEVICE unsigned batches(unsigned unit) const {
    if (unit < whole) return kRunBatches * kRunsOfGroup;
    if (unit < in_full_slabs()) return kRunBatches;
    return (in_runs() % kSlabRows + kStep - 1) / kStep;
  }
};

// The batches of a team, through all units of its CTA. All teams of a CTA have equally many, because
// they meet at the end of every run.
struct Schedule {
  static constexpr unsigned kFar = kStages - kReload > 1 ? kStages - kReload : 1;
  static constexpr unsigned kNone = 3u << 30;  // past the last batch

  Units units;
  unsigned every, count;
  unsigned unit, left;          // unit of the batch that is due; its batches left, including this one
  unsigned far_unit, far_left;  // the same for the batch farthest ahead
  unsigned batch;               // the batch that is due
  unsigned coming[kFar]{};      // the batches after it

  // Greater than any batch.
  DEVICE static unsigned end(long long rows) {
    return (static_cast<unsigned>(rows) + Units::kSlabRows - 1) / Units::kSlabRows * Units::kSlabRows;
  }
  // Every CTA has at least one unit.
  DEVICE Schedule(long long rows, unsigned whole, unsigned first, unsigned participants)
      : units{whole, static_cast<unsigned>(rows)}, every(participants), count(units.count()),
        unit(first), left(units.batches(first)), far_unit(first), far_left(left) {
    coming[kFar - 1] = units.first_row(first) + team_index();
#pragma unroll 1
    for (unsigned i = 0; i < kFar; ++i) advance();
  }
  DEVICE void advance() {
    batch = coming[0];
#pragma unroll
    for (unsigned i = 1; i < kFar; ++i) coming[i - 1] = coming[i];
    coming[kFar - 1] += Units::kStep;
    if (--far_left == 0) {
      far_unit += every;
      coming[kFar - 1] = far_unit < count ? units.first_row(far_unit) + team_index() : kNone;
      far_left = units.batches(far_unit);
    }
  }
  // Past the last unit, units.batches() means nothing: a count of 0 wraps and does not end again, and
  // kNone grows by a few steps, far from 2^32.
  DEVICE void next() {
    advance();
    if (--left == 0) left = units.batches(unit += every);
  }
  // The batch `n` after the one that is due.
  DEVICE unsigned ahead(unsigned n) const {
    unsigned found = batch;
#pragma unroll
    for (unsigned i = 0; i < kFar; ++i)
      if (n == i + 1) found = coming[i];
    return found;
  }

  DEVICE bool ends_run() const { return (left - 1) % Units::kRunBatches == 0; }
  DEVICE bool in_first_run() const {
    return unit >= units.whole || left > Units::kRunBatches * (kRunsOfGroup - 1);
  }
  DEVICE bool ends_unit() const { return left == 1; }
};

// Where the teams of a CTA wait for the sums of a run. One thread arrives for its team, after a barrier
// of the team.
struct RunBarrier {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  // Without the mbarriers of sm_90, all teams meet here, and none runs ahead.
  DEVICE RunBarrier(unsigned char*) {}
  DEVICE void arrive() const {}
  DEVICE void wait(unsigned) const { cta_barrier(); }
#else
  unsigned long long* const barrier;

  DEVICE RunBarrier(unsigned char* smem)
      : barrier(reinterpret_cast<unsigned long long*>(smem + kRunsWrittenOffset)) {
    if constexpr (kTeams > 1) {
      // Only threads of this CTA use it, so the CTA barrier is all the ordering that it needs.
      if (threadIdx.x == 0) mbarrier_init(barrier, kTeams);
      cta_barrier();
    }
  }
  DEVICE void arrive() const { mbarrier_expect(barrier, 0); }  // and expects no bytes
  DEVICE void wait(unsigned run) const { mbarrier_wait(barrier, run % 2); }
#endif
};

// The sums of runs over teams, and of a group's runs so far, in shared memory that no bulk copy touches.
// A team writes its sums of a run, continues, and adds the sums of all teams when it ends its next run.
// So a team waits for another only if it is a whole run ahead.
// Two buffers suffice. A team that writes run r has added run r - 1. So all teams have written run
// r - 1, and before that they have added run r - 2, which is what the buffer held.
// Memory ordering. The team's barrier orders the accesses of its threads before the arrival of one of
// them (release at CTA scope), and those who wait acquire.
struct RunSums {
  static constexpr int kQuads = kVectors * kElements / 4;  // four columns each
  static constexpr int kBuffers = kTeams > 1 ? 2 : 1;

  float* const sums;
  const RunBarrier written;
  unsigned runs = 0;  // written by this team
  bool first, last;   // whether the newest run is the first or the last of its unit
  float* to;          // the unit's row of the workspace

  DEVICE RunSums(unsigned char* smem)
      : sums(reinterpret_cast<float*>(smem + kBlockSumsOffset)), written(smem) {}
  // Where this thread's counterpart in `team` keeps four floats; without bank conflicts.
  DEVICE float* place(unsigned run, int quad, unsigned team) const {
    return sums + ((run % kBuffers * kQuads + quad) * kThreads + team * kTeamThreads + team_thread()) * 4;
  }
  // Where the sum over teams is kept, after the buffers.
  DEVICE float* total(int quad) const {
    if constexpr (kTeams == 1) return place(0, quad, 0);
    return sums + (kBuffers * kQuads * kThreads + quad * kTeamThreads + team_thread()) * 4;
  }
  // Ends a run, which may be the first or the last of its unit. The unit's sum goes `into` a row of the
  // workspace. `partial` belongs to this thread's team.
  DEVICE void end_run(const float (&partial)[kVectors][kElements], const Rows& rows, bool is_first,
                      bool is_last, float* into) {
    if constexpr (kTeams > 1) {
      add_written(rows);
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad)
        store_shared4(place(runs, quad, team_index()), quad_of(partial, quad));
      team_barrier();
      if (team_thread() == 0) written.arrive();
    }
    ++runs;
    first = is_first;
    last = is_last;
    to = into;
    if constexpr (kTeams == 1)
      add(rows, [&](int quad) { return quad_of(partial, quad); });
  }
  // Sums the newest run of this team, if any, over all teams, and adds it to the runs before.
  DEVICE void add_written(const Rows& rows) const {
    if (kTeams == 1 || runs == 0) return;
    written.wait(runs - 1);
    add(rows, [&](int quad) {
      return sum_in_pairs<0, kTeams>([&](int team) { return load_shared4(place(runs - 1, quad, team)); });
    });
  }
  template <typename Sum> DEVICE void add(const Rows& rows, Sum sum_of) const {
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      if (quad % kTeams != team_index()) continue;  // the teams share the columns
      float4 sum = sum_of(quad);
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
