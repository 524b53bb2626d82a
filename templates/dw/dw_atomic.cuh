// ---- Strategy `atomic`: free-running atomic adds ----------------------------------------------
// Every CTA adds its partial dw to one row of the workspace with atomics, in the order in which CTAs
// finish. The last one rounds the sums to dw and zeroes them for the next call.
// These adds flush subnormal numbers to zero, as the hardware's floating-point reductions do.
// Determinism class none: the order of the adds, and so the bits, change from run to run.
//
// Memory ordering. The CTA barrier orders all threads' atomics before thread 0's ticket, which is an
// acquire-release at gpu scope. So the CTA with the last ticket sees all sums.
struct DwStrategy : DwContext {
  DEVICE unsigned begin() const { return blockIdx.x / kCluster; }
  DEVICE void finish(const Rows& rows, const float (&partial)[kVectors][kElements],
                     unsigned) const {
    const float* teams = store_partials(smem, rows, partial);
    float* sums = zeroed + rank * kPartialStride;
    for_each_quad(columns, [&](int column) {
      add_workspace(sums + column, cta_partial(teams, column));
    });
    cta_barrier();
    unsigned ticket = 0;
    if (threadIdx.x == 0) ticket = take_ticket(counters + rank);
    if (broadcast(smem, ticket) + 1 < participants) return;
    for_each_quad(columns, [&](int column) {
      own_dw().store4(column, columns, load_workspace(sums + column));
      store_workspace(sums + column, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
    });
    if (threadIdx.x == 0) store_relaxed(counters + rank, 0);
  }
};
