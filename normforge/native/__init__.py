"""The launch path in C++, built on request."""
