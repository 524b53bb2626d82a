"""The search space: which configs are legal, and which are near each other."""
