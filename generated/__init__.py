"""The packages of kernels that runs of the tuner wrote, as `generated.<gpu>.<operation>`; installed
they are `normforge.generated.<gpu>.<operation>`."""
