"""Results files made by hand, so small that what pages say of them can be worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pages import comparison, text

PEERS = {"cudnn": "cuDNN 9.1, nvidia-cudnn-frontend 1.0", "quack": "quack-kernels 0.6.5"}


def use(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The pages read results and tables below this folder, and nothing else."""
    for module in (text, comparison):
        monkeypatch.setattr(module, "RESULTS", folder)
    monkeypatch.setattr(text, "GENERATED", folder)


def write(folder: Path, name: str, document: Any) -> None:
    """A results file, or a table by its path."""
    path = folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document), encoding="utf-8")


def compared(shape: str, floor: float, ours: float, **peers: float) -> dict[str, Any]:
    """A row of a comparison, from microseconds."""
    size, dtype = shape.split(":")
    M, N = map(int, size.split("x"))
    cells = {name: {"us": us, "error_dx": 1.0, "error_dw": 1.0} for name, us in peers.items()}
    return {
        **{"M": M, "N": N, "dtype": dtype, "weight_dtype": dtype, "how": "tuned"},
        **{"add_us": floor, "ours_us": ours, "ours_error_dx": 1.0, "ours_error_dw": 1.25},
        "peers": cells,
    }


def comparison_of(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"environment": {"peers": PEERS, "gpu": "GPU", "torch": "2.11.0"}, "rows": list(rows)}


def tuned(shape: str, ratio: float, trials: int = 60, **spec: Any) -> dict[str, Any]:
    """An entry of a package's table."""
    size, dtype = shape.split(":")
    M, N = map(int, size.split("x"))
    facts = {"ratio": ratio, "trials": trials, "study": f"{shape}@gpu"}
    kernel = {"spec": {"offset": False, "residual": "", **spec}}
    return {
        **{"M": M, "N": N, "dtype": dtype, "weight_dtype": dtype},
        **{"provenance": facts, "kernel": kernel, "evidence": "measured"},
    }


def cells(page: str, row: str) -> list[str]:
    """Return the cells of the one line of a table that begins so."""
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {row}")]
    return [cell.strip() for cell in line.strip("| ").split("|")][1:]
