"""From a cubin to a launch: driver, arguments, workspace."""
