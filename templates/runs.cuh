// ---- Runs, groups and units of rows -----------------------------------------------------------
// Here the order in which rows are added depends on the rows alone, not on the grid:
//   run    kRunRows consecutive rows, added one after another by the threads of one team;
//   group  kGroupRows rows: its runs, added one after another;
//   chunk  kChunkRows rows: its groups, added in pairs and pairs of pairs (sum_units.cuh);
//   dw     its chunks, added one after another.
// A team works on whole units and leaves the sum of each in the workspace: a unit is a run or a
// group. Which of them, how many teams there are and which team has which unit changes no bit.

// Every team works on every participants * kTeams-th unit, batch by batch.
struct Schedule {
  static constexpr unsigned long long kUnitBatches = kUnitRows / kBatchRows;
  static constexpr unsigned long long kRunBatches = kRunRows / kBatchRows;
  static_assert(kRunRows % kBatchRows == 0 && kUnitRows % kRunRows == 0, "whole batches and runs");

  long long batch;  // the one that is due
  long long skip;   // batches of other teams between two units of this one

  DEVICE Schedule(long long unit, long long step)
      : batch(unit * static_cast<long long>(kUnitBatches)),
        skip((step - 1) * static_cast<long long>(kUnitBatches)) {}
  DEVICE unsigned long long in_unit() const {
    return static_cast<unsigned long long>(batch) % kUnitBatches;
  }
  // The batch that comes `count` after it; past the end when it is no less than rows.batches. Units
  // follow each other in the order of their rows, so behind one past the end there is none before.
  DEVICE long long ahead(int count) const {
    return batch + count + static_cast<long long>((in_unit() + count) / kUnitBatches) * skip;
  }
  DEVICE void next() { batch = ahead(1); }
  // The unit of the batch that is due, its run in the unit, and whether it is the last of either.
  DEVICE unsigned unit() const {
    return static_cast<unsigned>(static_cast<unsigned long long>(batch) / kUnitBatches);
  }
  DEVICE bool in_first_run() const { return in_unit() < kRunBatches; }
  DEVICE bool ends_run(long long batches) const {
    return (in_unit() + 1) % kRunBatches == 0 || batch + 1 == batches;
  }
  DEVICE bool ends_unit(long long batches) const {
    return in_unit() + 1 == kUnitBatches || batch + 1 == batches;
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
