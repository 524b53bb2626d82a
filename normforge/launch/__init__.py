"""Launches a cubin: driver, arguments, workspace."""
