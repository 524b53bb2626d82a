// ---- Strategy `separate`: a second kernel sums ------------------------------------------------
// Every CTA stores its partial dw in the workspace. The end of the grid orders those stores before the
// second kernel, which sums slices of kTailColumns columns over all rows, in the order of sum_slice.
// With programmatic dependent launch the second kernel starts early. Before its first access to
// memory, each of its threads waits until this grid has ended and its stores are visible. It waits for
// the grid before it on the stream, so the two are launched back to back: the host holds a lock, and a
// program must not put a kernel between them from another thread.
// allow_dependents publishes nothing, so the stores may follow it.
// Determinism class gpu_to_gpu: one order of adds, by index.
struct DwStrategy : DwContext {
  DEVICE unsigned begin() const { return blockIdx.x / kCluster; }
  DEVICE void finish(const Rows& rows, const float (&partial)[kVectors][kElements],
                     unsigned participant) const {
    allow_dependents();
    store_row_of(participant, rows, partial);
  }
};

// count: rows of partial dw; columns: of the whole row. CTA b sums slice b / kCluster of rank
// b % kCluster.
extern "C" __global__ void __launch_bounds__(kSumThreads)
    sum_partials(const float* scratch, void* dw, int count, int columns, int dw_mode) {
  STATIC_SHARED(float, buffer, kSumThreads * 4);
  const int rank = static_cast<int>(blockIdx.x) % kCluster;
  const int slice = static_cast<int>(blockIdx.x) / kCluster;
  const DwOutput out = DwOutput{dw, dw_mode}.from(rank * kColumns);
  wait_for_primary();
  sum_slice<kSumThreads, kTailColumns>(
      scratch + rank * kPartialStride, static_cast<long long>(kCluster) * kPartialStride,
      static_cast<unsigned>(count), slice * kTailColumns, kExact ? kColumns : columns,
      buffer, [&](int column, float total) { out.store(column, total); });
}
