"""How PyTorch programs reach the kernels: functions, modules, operators, graphs."""
