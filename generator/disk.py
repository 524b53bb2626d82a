"""Waiting for the disk: what a power cut must not take back."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
