"""Chooses which config is tried next, and which one wins."""
