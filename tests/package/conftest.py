"""The fixtures of these tests: where packages are written, and how they are imported."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from generator.paths import REPOSITORY
from tests.support.packages import forget


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return tmp_path / "h200" / "rmsnorm_backward"


@pytest.fixture
def imported(package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports the package as somebody would who copied it into a project."""
    monkeypatch.syspath_prepend(package.parent)

    def load() -> ModuleType:
        forget("rmsnorm_backward")
        return importlib.import_module("rmsnorm_backward")

    yield load
    forget("rmsnorm_backward")


@pytest.fixture
def wheel_sources(tmp_path: Path) -> Path:
    """A copy of what a wheel is built of."""
    pytest.importorskip("setuptools", "77", reason="building needs setuptools 77")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    for name in ("normforge", "generated", "templates"):
        skip = shutil.ignore_patterns("__pycache__", "studies.journal*", "native_*.so")
        shutil.copytree(REPOSITORY / name, source / name, ignore=skip)
    return source
