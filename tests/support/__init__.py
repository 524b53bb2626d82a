"""What several tests share. No test imports a test."""
