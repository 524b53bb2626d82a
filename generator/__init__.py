"""The generator and the tuner. docs/architecture.md: what each package is for, and their order."""
