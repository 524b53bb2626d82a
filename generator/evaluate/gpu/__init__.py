"""Measures candidates on a GPU, in a worker process that may be lost."""
