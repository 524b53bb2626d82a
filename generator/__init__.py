"""Normforge: generate, verify and search CUDA C++ RMSNorm-backward kernels."""
