#ifndef NORMFORGE_HOST
// A barrier of the cluster that publishes initialised barriers and nothing else: the fence of whoever
// has initialised them (mbarrier_init_fence) orders that before a relaxed arrival (PTX ISA, "membar,
// fence": fence.mbarrier_init). An arrival that releases everything waits until the whole GPU can see
// what the thread has written (MEMBAR.GPU), at the start of every launch.
DEVICE void cluster_barrier_of_inits() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Waits for sums that other CTAs of the cluster have sent. The wait itself is relaxed. The fence behind it
// makes an acquire of it, for objects in shared memory only (PTX ISA, "membar, fence": .sync_restrict),
// and the sums are all that is read on account of it. An acquire of everything at cluster scope empties the
// L1 cache (CCTL.IVALL), for each warp and batch.
DEVICE void mbarrier_wait_sums(unsigned long long* barrier, unsigned phase) {
  unsigned done = 0;
  while (!done) {
    asm volatile(
        "{\n .reg .pred p;\n"
        " mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 p, [%1], %2;\n"
        " selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done) : "r"(shared_address(barrier)), "r"(phase) : "memory");
  }
  asm volatile("fence.acquire.sync_restrict::shared::cluster.cluster;" ::: "memory");
}
#endif
