"""What is computed: inputs, float64 references, error bounds."""
