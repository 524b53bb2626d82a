"""Wheels that tests build and unpack."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

from tests.support.patience import patience


def wheel_of(folder: Path, site: Path) -> tuple[str, list[str]]:
    """The name of the wheel that a folder builds, and its files, which are unpacked into `site`."""
    build = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    done = subprocess.run(
        [sys.executable, "-c", build],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=patience(300),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (wheel,) = folder.glob("*.whl")
    with ZipFile(wheel) as archive:
        archive.extractall(site)
        return wheel.name, archive.namelist()
