"""The command line of tune.py."""
