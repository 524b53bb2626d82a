"""Measured numbers about layers of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.pages.text import read, table
from benchmarks.training.layers import TITLES, WAYS


def layers() -> str:
    """Milliseconds of the kernels beside products and attention in one layer's step."""
    return _by_way(read("layers_h100")["layers"])


def layers_with_sums() -> str:
    """Milliseconds of those kernels on an H200, whose packages add gradients in the norms'
    backwards; in parentheses without these."""
    return _by_way(read("layers_h200")["layers"], read("layers_without_sums_h200")["layers"])


def _by_way(found: dict[str, Any], before: dict[str, Any] | None = None) -> str:
    def cell(model: str, way: str) -> str:
        time = f"{found[model][way]['others_ms']:.2f}"
        return time if before is None else f"{time} ({before[model][way]['others_ms']:.2f})"

    measured = next(iter(found.values()))
    lines = [(WAYS[way].title, *(cell(model, way) for model in found)) for way in measured]
    return table(["ms per step", *(TITLES[model] for model in found)], lines)


LAYERS_BLOCKS: dict[str, Callable[[], str]] = {
    "layers": layers,
    "layers_with_sums": layers_with_sums,
}
