// ---- Runs and groups of rows --------------------------------------------------------------------
// Here the order in which rows are added depends on the rows alone, not on the grid:
//   run    kRunRows consecutive rows, added one after another by the threads of one team;
//   group  kGroupRows rows: its runs, added one after another;
//   chunk  kChunkRows rows: its groups, added in pairs and pairs of pairs (sum_groups.cuh);
//   dw     its chunks, added one after another.
// A team works on whole groups and leaves the sum of each in the workspace, or on single runs and
// leaves those. The launch says how many groups are left as a whole, `args.group`: the runs of the
// others let all teams end at about the same time. That number, how many teams there are and which of
// them does what change no bit.

// The groups that are left as a whole go round the teams, then the runs of the others do.
struct Schedule {
  static constexpr unsigned kGroupBatches = kGroupRows / kBatchRows;
  static constexpr unsigned kRunBatches = kRunRows / kBatchRows;
  static_assert(kRunRows % kBatchRows == 0 && kGroupRows % kRunRows == 0, "whole batches and runs");

  unsigned team, teams, groups;
  unsigned own;        // batches of this team's groups
  unsigned place = 0;  // of the batch that is due among those of this team
  long long batch;     // that is due

  DEVICE Schedule(unsigned first, unsigned step, unsigned whole)
      : team(first), teams(step), groups(whole),
        own(whole > first ? ((whole - first - 1) / step + 1) * kGroupBatches : 0), batch(at(0)) {}
  // The batch at a place. They ascend; behind one past the end of the rows there is none before it.
  DEVICE long long at(unsigned p) const {
    if (p < own)
      return static_cast<long long>(team + p / kGroupBatches * teams) * kGroupBatches +
             p % kGroupBatches;
    p -= own;
    return static_cast<long long>(groups) * kGroupBatches +
           static_cast<long long>(team + p / kRunBatches * teams) * kRunBatches + p % kRunBatches;
  }
  DEVICE long long ahead(int count) const { return at(place + count); }
  DEVICE void next() { batch = at(++place); }

  DEVICE bool in_first_run() const { return place >= own || place % kGroupBatches < kRunBatches; }
  DEVICE bool ends_run(long long batches) const {
    return (place + 1) % kRunBatches == 0 || batch + 1 == batches;
  }
  // At the end of a run: whether what it ends is left in the workspace, and in which row.
  DEVICE bool leaves_sum(long long batches) const {
    return place >= own || (place + 1) % kGroupBatches == 0 || batch + 1 == batches;
  }
  DEVICE unsigned row() const {
    return place < own ? team + place / kGroupBatches * teams
                       : groups + team + (place - own) / kRunBatches * teams;
  }
};

// The sum of a group's runs so far, in shared memory: in places that no other thread and no bulk copy
// touches, so that it needs neither a barrier nor a fence.
struct RunSums {
  float* sums;

  DEVICE RunSums(unsigned char* smem)
      : sums(reinterpret_cast<float*>(smem + kBlockSumsOffset)) {}
  DEVICE float* place(int j, int i) const {  // four floats, without bank conflicts
    return sums + ((j * kElements + i) / 4 * kThreads + threadIdx.x) * 4;
  }
  // Adds the runs before this one to `partial`, in front of it.
  DEVICE void add(float (&partial)[kVectors][kElements]) const {
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
#pragma unroll
      for (int i = 0; i < kElements; i += 4) {
        const float4 before = load_shared4(place(j, i));
        partial[j][i] = __fadd_rn(before.x, partial[j][i]);
        partial[j][i + 1] = __fadd_rn(before.y, partial[j][i + 1]);
        partial[j][i + 2] = __fadd_rn(before.z, partial[j][i + 2]);
        partial[j][i + 3] = __fadd_rn(before.w, partial[j][i + 3]);
      }
  }
  DEVICE void keep(const float (&partial)[kVectors][kElements]) const {
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
#pragma unroll
      for (int i = 0; i < kElements; i += 4)
        store_shared4(place(j, i), make_float4(partial[j][i], partial[j][i + 1],
                                               partial[j][i + 2], partial[j][i + 3]));
  }
};
