"""Renders what the pages in docs/ and the README say about the committed results and functions."""
