"""Measures what a norm's speed is worth in a training step."""
