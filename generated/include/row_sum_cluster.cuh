// The CTAs of a cluster share a row. Every warp sends its sum to every CTA, including its own, into one
// of two buffers with one transaction barrier each. A phase of a barrier completes when this
// CTA's thread has arrived (mbarrier_expect) and all kCluster * kWarpsPerRow sums of each row of the
// batch have landed here. Sums may land before the arrival, whose pending count keeps the phase open.
//
// Why two buffers suffice. No CTA sends into a buffer before this CTA has seen the buffer's previous
// phase complete: a CTA sends for batch i + 2 only after it has received this CTA's sums of batch
// i + 1, and this CTA sends those only after it has seen batch i complete. (A single barrier would not do:
// it could count a fast CTA's sums of batch i + 1 in a phase that still waits for a slow CTA's sums of
// batch i.) Each warp reads the sums of batch i before it sends for batch i + 1, in program order and
// with a warp barrier in between, and so before anyone can send for batch i + 2 into the same buffer.
// (This assumes that the completion of st.async, a release at cluster scope, covers what the sending
// thread did before. In hardware it matters only for reads that do not feed the sent sum: those of the
// sums before, of the residual, and of a reload. The PTX ISA denies it for bulk copies, and says nothing
// about st.async; docs/emulator.md, "Limits", has more.)
//
// Why the exchange can replace the team's barrier. A phase completes only after every warp of the team
// has sent, and a warp sends after its reads of the stage. So, on the same assumption, the stage can be
// refilled.
//
// Why a CTA may end while its peers still run. It has received every sum that is ever sent to it, and
// no other CTA reads its shared memory.
struct RowSum {
  static constexpr int kSums = kRowsInFlight * kCluster * kWarpsPerRow;

  float* sums;
  unsigned long long* arrived;
  unsigned batch = 0;

  DEVICE explicit RowSum(unsigned char* smem)
      : sums(reinterpret_cast<float*>(smem + kSumsOffset) + team_index() * 2 * kSums),
        arrived(reinterpret_cast<unsigned long long*>(smem) + kTeams * kStageBarriers +
                2 * team_index()) {
    if (team_thread() == 0) {
      mbarrier_init(&arrived[0], 1);
      mbarrier_init(&arrived[1], 1);
      mbarrier_init_fence();
    }
  }
  DEVICE void operator()(float (&value)[kRowsInFlight]) {
    send(value);
    receive(value);
  }
  DEVICE void send(float (&value)[kRowsInFlight]) {
    const unsigned buffer = batch & 1;
    float* into = sums + buffer * kSums;
    if (team_thread() == 0) mbarrier_expect(&arrived[buffer], kSums * sizeof(float));
    const unsigned lane = threadIdx.x % 32, warp = team_thread() / 32;
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) value[u] = warp_sum(value[u]);
    warp_barrier();  // a lane sends for its whole warp, whose reads are now done
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      if (lane < kCluster)
        store_cluster(into + (u * kCluster + cluster_rank()) * kWarpsPerRow + warp, value[u],
                      &arrived[buffer], lane);
    }
  }
  DEVICE void receive(float (&value)[kRowsInFlight]) {
    const unsigned buffer = batch & 1, phase = (batch >> 1) & 1;
    const float* into = sums + buffer * kSums;
    mbarrier_wait_cluster(&arrived[buffer], phase);
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u)
      value[u] = sum_shared<kCluster * kWarpsPerRow>(into + u * kCluster * kWarpsPerRow);
    ++batch;
  }
};
