"""Measured numbers about layers of models."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.pages.text import read, table
from benchmarks.training.layers import TITLES, WAYS


def layers() -> str:
    """Milliseconds of the kernels beside products and attention in one layer's step."""
    found = read("layers_h100")["layers"]
    lines = [
        (how.title, *(f"{found[model][way]['others_ms']:.2f}" for model in found))
        for way, how in WAYS.items()
    ]
    return table(["ms per step", *(TITLES[model] for model in found)], lines)


LAYERS_BLOCKS: dict[str, Callable[[], str]] = {"layers": layers}
