"""Which config is tried next, and which one wins."""
