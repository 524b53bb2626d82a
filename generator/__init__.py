"""The generator and the tuner. docs/architecture.md: what each package is for, and their order."""

IMPORTS_PYTORCH_LATER = True
"""Tells the library, which does the same then: a process that compiles needs none, and a mistyped
option is told at once."""
