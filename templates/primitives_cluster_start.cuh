#ifndef NORMFORGE_HOST
// A barrier of the cluster that publishes initialised barriers and nothing else: the fence of whoever
// has initialised them (mbarrier_init_fence) orders that before a relaxed arrival (PTX ISA, "membar,
// fence": fence.mbarrier_init). An arrival that releases everything waits until the whole GPU can see
// what the thread has written (MEMBAR.GPU), at the start of every launch.
DEVICE void cluster_barrier_of_inits() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
#endif
