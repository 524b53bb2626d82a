"""Packages as repositories of Hugging Face's `kernels`."""
