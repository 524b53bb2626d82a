"""One run: its shapes, its GPUs, its interruptions."""
