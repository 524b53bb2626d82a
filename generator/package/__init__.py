"""Winners become an importable package."""
