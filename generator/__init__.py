"""The generator and the tuner. docs/architecture.md says what each package is for.

A file imports only from packages left of its own: errors, paths, processes, runtime < problem,
target, result < operations < kernels < space < evaluate < studies < package < emulate < search <
tuner < report < cli. tests/test_layers.py holds it to that.
"""
