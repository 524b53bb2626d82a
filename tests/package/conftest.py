"""Where packages of these tests are written, and how they are imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return tmp_path / "h200" / "rmsnorm_backward"


@pytest.fixture
def imported(package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports the package as somebody would who copied it into a project."""
    monkeypatch.syspath_prepend(package.parent)

    def load() -> ModuleType:
        forget()
        return importlib.import_module("rmsnorm_backward")

    def forget() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "rmsnorm_backward"]:
            del sys.modules[name]
        importlib.invalidate_caches()

    yield load
    forget()
