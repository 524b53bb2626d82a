// ---- Strategy `separate` on groups: a second kernel sums ---------------------------------------
// As dw_separate.cuh, but the rows of the workspace are the sums of groups and runs (runs.cuh). The
// threads of the second kernel wait for the end of this grid before their first access to memory.
// Determinism class batch_invariant: the index of a row alone decides when it is added.
struct DwStrategy : DwContext {
  DEVICE unsigned begin() const { return blockIdx.x / kCluster; }
  DEVICE void finish(const Rows&, const float (&)[kVectors][kElements], unsigned) const {
    allow_dependents();
  }
};

// count: rows of the workspace; whole: groups among them; columns: of the whole row. CTA b sums slice
// b / kCluster of rank b % kCluster.
extern "C" __global__ void __launch_bounds__(kSumThreads)
    sum_partials(const float* scratch, void* dw, int count, int columns, int dw_mode, int whole) {
  STATIC_SHARED(float, buffer, (Lanes<kSumThreads, kTailColumns>::kFloats));
  const int rank = static_cast<int>(blockIdx.x) % kCluster;
  const int slice = static_cast<int>(blockIdx.x) / kCluster;
  const DwOutput out = DwOutput{dw, dw_mode}.from(rank * kColumns);
  wait_for_primary();
  const GroupSums workspace{scratch + rank * kPartialStride,
                            static_cast<long long>(kCluster) * kPartialStride,
                            static_cast<unsigned>(whole), static_cast<unsigned>(count)};
  sum_groups<kSumThreads, kTailColumns>(workspace, slice * kTailColumns,
                                        kExact ? kColumns : columns, buffer, out);
}
