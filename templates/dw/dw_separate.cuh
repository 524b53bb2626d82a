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
