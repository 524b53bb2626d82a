#ifndef NORMFORGE_HOST
// Asks the L2 for the sector at an address. Nothing waits for it, and nothing is ordered by it.
DEVICE void prefetch_l2(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }
#endif
