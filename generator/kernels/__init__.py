"""A config becomes machine code: geometry, source, cubin, resources."""
