#ifndef NORMFORGE_HOST
// Copies of what rows of a group share into stages, beside the rows. Other teams read the same, so that
// they go through the caches as usual.
template <int kBytes> DEVICE void copy_numbers(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from), "n"(kBytes)
               : "memory");
}
#if __CUDA_ARCH__ >= 900
DEVICE void bulk_load_numbers(void* to, const void* from, unsigned bytes, unsigned long long* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
#endif
#endif
