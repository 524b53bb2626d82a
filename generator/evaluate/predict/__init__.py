"""Predicts the times of compiled kernels by a model, where the GPU is absent."""
