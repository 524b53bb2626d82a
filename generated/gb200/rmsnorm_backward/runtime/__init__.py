"""Plain Python that is copied into every emitted package: no import from outside this folder but
torch and cuda-python, and nothing here touches CUDA before the first call."""
