"""The packages of kernels that runs of the tuner wrote, as `normforge.generated.<gpu>.<operation>`; in
a checkout also as `generated.<gpu>.<operation>`."""
