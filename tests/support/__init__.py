"""The helpers that several tests share. No test imports a test."""
