"""The generator and the tuner. docs/architecture.md: what each package is for, and their order."""

IMPORTS_PYTORCH_LATER = True
"""Tells the library to import PyTorch only where it is needed, as the generator does: a process
that compiles needs none, and a mistyped option is told at once."""
