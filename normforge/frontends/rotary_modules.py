"""Tries the modules of a model that compute cos and sin on the CPU: kernels read the first half of
both alone, so the second one has to be the same."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch

_AXES = (0, 3, 4)
"""Axes of positions: 0 for positions alone, as of text; several for those of images, too."""
_TOKENS = 5


def with_other_halves(model: torch.nn.Module) -> str:
    """Return the name of the class of a module that gives cos or sin whose halves differ, "" where
    none is found."""
    known: set[Any] = set()
    for module in model.modules():
        kind: Any = type(module)
        if "rotary" in kind.__name__.lower() and kind not in known:
            known.add(kind)
            if _gives_other_halves(module):
                return str(kind.__name__)
    return ""


def _gives_other_halves(module: Any) -> bool:
    try:
        if len(inspect.signature(module.forward).parameters) < 2:
            return False
        here = copy.deepcopy(module).to("cpu", torch.float32)
    except Exception:  # it cannot be copied
        return False
    return any(_halves_differ(here, axes) for axes in _AXES)


def _halves_differ(here: Any, axes: int) -> bool:
    """Return True if a module computes such numbers of positions; False if it takes others."""
    steps = torch.arange(_TOKENS)
    positions = [(steps * (axis + 1) % _TOKENS)[None] for axis in range(max(1, axes))]
    try:
        with torch.no_grad():
            found = here(
                torch.ones(1, _TOKENS, 1), torch.stack(positions) if axes else positions[0]
            )
        return any(_differ(one) for one in found)
    except Exception:  # it takes something else
        return False


def _differ(numbers: Any) -> bool:
    """Return True for numbers that are neither the same in both halves nor in neighbours, which a
    trial of the rotation tells apart."""
    columns = numbers.shape[-1]
    first, second = numbers[..., : columns // 2], numbers[..., columns // 2 :]
    neighbours = torch.equal(numbers[..., ::2], numbers[..., 1::2])
    return not torch.equal(first, second) and not neighbours
