"""Checks of one kernel on one problem, on a GPU."""
