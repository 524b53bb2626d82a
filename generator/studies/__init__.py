"""The studies: what was measured, and where it is kept."""
