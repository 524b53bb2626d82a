#ifndef NORMFORGE_HOST
DEVICE void mbarrier_arrive(unsigned long long* barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
// The index of the warp, and whether the thread is the one that its warp has elected: numbers and a
// branch of which the compiler knows that they are the same for the whole warp. Without that, each copy
// becomes a loop over lanes, and the few dozen instructions before it delay the first rows of a launch.
DEVICE unsigned warp_index() { return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0); }
DEVICE bool elected() {
  unsigned chosen;
  asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}"
               : "=r"(chosen));
  return chosen != 0;
}
DEVICE float shuffle_from(float value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
#endif
