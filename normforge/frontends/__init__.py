"""The ways by which PyTorch programs reach the kernels: functions, modules, operators, graphs."""
