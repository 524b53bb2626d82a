"""Benchmarks: the kernels against other implementations, and against the CPU emulator."""
