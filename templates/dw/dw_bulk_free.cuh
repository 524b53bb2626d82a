// ---- Strategy `bulk_reduce`, free-running -----------------------------------------------------
// Every CTA's partial dw goes to one row of the workspace as a bulk reduce-add, in the order in which
// CTAs finish. The last one rounds the sums to dw and zeroes them for the next call. These adds flush
// subnormal numbers to zero.
// Determinism class none: the order of the adds, and so the bits, change from run to run.
//
// Memory ordering. A proxy fence and the CTA barrier come before the bulk operation. The full wait (not
// `.read`) and a proxy fence come before the ticket, which releases the landed sums and acquires
// those of all others. The zeros are ordinary stores. The next launch's bulk operations come after the
// end of this grid, and stream order holds for every proxy.
struct DwStrategy : DwContext {
  DEVICE unsigned begin() const { return blockIdx.x / kCluster; }
  DEVICE void finish(const Rows& rows, const float (&partial)[kVectors][kElements],
                     unsigned) const {
    float* teams = store_partials(smem, rows, partial);
    float* sums = zeroed + rank * kPartialStride;
    for_each_quad(columns, [&](int column) {
      store_shared4(teams + column, cta_partial(teams, column));
    });
    fence_async_shared();
    cta_barrier();
    unsigned ticket = 0;
    if (threadIdx.x == 0) {
      bulk_add(sums, teams, (columns + 3) / 4 * 16);
      bulk_commit();
      bulk_wait_written();
      fence_async_global();
      ticket = take_ticket(counters + rank);
    }
    if (broadcast(smem, ticket) + 1 < participants) return;
    for_each_quad(columns, [&](int column) {
      own_dw().store4(column, columns, load_workspace(sums + column));
      store_workspace(sums + column, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
    });
    if (threadIdx.x == 0) store_relaxed(counters + rank, 0);
  }
};
