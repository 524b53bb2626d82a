"""Mutants: bugs that are planted on purpose, and the tests that have to find them."""
