"""Predicted: a model of the compiled kernel, where the GPU is absent."""
