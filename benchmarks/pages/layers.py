"""Measured numbers about layers of models."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.pages.text import read, table
from benchmarks.training.layers import TITLES

_WAYS = {
    "eager": "eager",
    "eager_patched": "eager, `patch`",
    "eager_fused": "eager, `patch(fuse=True)`",
    "inductor": "Inductor",
    "backend": "`inductor_backend()`",
    "patched": "`patch`, Inductor",
    "fused": "`patch(fuse=True)`, Inductor",
    "both": "`patch(fuse=True)`, `inductor_backend()`",
}


def layers() -> str:
    """Milliseconds of the kernels beside products and attention in one layer's step."""
    found = read("layers_h100")["layers"]
    lines = [
        (how, *(f"{found[model][way]['others_ms']:.2f}" for model in found))
        for way, how in _WAYS.items()
    ]
    return table(["ms per step", *(TITLES[model] for model in found)], lines)


LAYERS_BLOCKS: dict[str, Callable[[], str]] = {"layers": layers}
