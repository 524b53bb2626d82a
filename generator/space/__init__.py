"""Which configs are legal, and which are near each other."""
