"""Finds layers of a model that add a norm's result to the residual stream, as those of OLMo 2 and
Gemma in transformers, and makes the forwards in which `rms_norm` with `add` serves both."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from ..serve.options import DTYPES
from . import rewritten
from .patch import REMADE, ModuleForward, original_class, replace_forwards
from .rms_norm import Norm
from .tried import (
    UNTRIED,
    alike,
    are_close,
    eps_of,
    evenly,
    formula_of,
    is_called_so,
    results_of,
    rows_to_try,
    with_its_dtype,
)

LAYER = "layer"
"""The name of what is patched here, beside the norms."""


def fuse_sums(norm: Norm, model: torch.nn.Module) -> list[str]:
    """Let `rms_norm` with `add` serve the norms of a model's layers whose results are added at
    once; the names of the layers. Each is tried on the CPU, without what stands between its norms,
    and left alone if it computes something else. The log says why (level INFO)."""

    def has_sums(module: Any) -> bool:
        return bool(_norms_of(module))

    return replace_forwards(model, LAYER, partial(_forward_for, norm), has_sums, quiet=True)


def _norms_of(module: Any) -> tuple[str, ...]:
    """Return the names of a module's norms whose results are added at once."""
    names = _sums_of(original_class(type(module)))
    return tuple(n for n in names if is_called_so("RMSNorm", getattr(module, n, None)))


@cache
def _sums_of(kind: Any) -> tuple[str, ...]:
    """Return the names of the modules of a class whose results are added at once."""
    made = rewritten.of_class(kind)
    return () if made is None else rewritten.sums_joined(made)


def _forward_for(norm: Norm, module: Any) -> ModuleForward | str:
    """Return the forward that serves a layer, or a sentence that says why it is left alone."""
    names = _norms_of(module)
    norms = [getattr(module, name) for name in names]
    weight, *others = (getattr(one, "weight", None) for one in norms)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1:
        return "its norms have no weights of one dimension"
    if any(getattr(other, "shape", None) != weight.shape for other in others):
        return "its norms have weights of several lengths"
    known = {formula_of(one) for one in norms}
    if len(known) > 1 or not known <= {"torch", "gemma"}:
        return "its norms do not all compute xhat * w or xhat * (1 + w)"
    (formula,) = known
    assert formula is not None and formula != UNTRIED
    offset = formula == "gemma"
    if _is_without_kernels(norm, weight, offset):
        return f"no kernel of rms_norm with add serves rows of {len(weight)} columns here"
    narrow = all(with_its_dtype(one, formula) == formula for one in norms)
    found = _forward_of(norm, original_class(type(module)), names, offset, narrow)
    try:
        same = _computes_the_same(module, names, found)
    except Exception:  # another kind of layer
        return "it raises an error on the CPU without what stands between its norms"
    return found if same else "it computes something else without what stands between its norms"


def _is_without_kernels(norm: Norm, weight: torch.Tensor, offset: bool) -> bool:
    """Return True if a GPU has no kernels that add. Without a GPU nothing is known."""
    if norm.added is None:
        return True
    if not torch.cuda.is_available():
        return False
    dtype = DTYPES.get(weight.dtype, "bf16")
    return not norm.added.has_kernel(1 << 14, len(weight), dtype, dtype, offset)


@cache
def _forward_of(
    norm: Norm, kind: Any, names: tuple[str, ...], offset: bool, narrow: bool
) -> ModuleForward:
    """Return the forward of a class whose norms of these names have the sums behind them. offset:
    1 is added to weights; narrow: the norms' results are in x's dtype, whatever the weight's."""
    made = rewritten.of_class(kind)
    assert made is not None and rewritten.sums_joined(made, names)

    def serve(module: Any, x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype if narrow else torch.promote_types(x.dtype, module.weight.dtype)
        if dtype != x.dtype or r.dtype != x.dtype or r.shape != x.shape:
            total: torch.Tensor = r + module(x)
            return total
        weight, number = module.weight, eps_of(module)
        return norm.rms_norm(x, weight, number, weight_offset=float(offset), add=r)

    found = rewritten.compiled(kind, made, serve)
    setattr(found, REMADE, partial(_forward_of, norm, kind, names, offset, narrow))
    return found


# ---- Tried on the CPU ----------------------------------------------------------------------------


class _StandIn(torch.nn.Module):
    """Stands between norms, as a function of the rows alone. Attention has a second result."""

    def __init__(self, function: Callable[..., torch.Tensor], second: bool) -> None:
        super().__init__()
        self.function, self.second = function, second

    def forward(self, *given: Any, **named: Any) -> Any:
        y = self.function(given[0] if given else named["hidden_states"])
        return (y, None) if self.second else y


def _computes_the_same(module: Any, names: tuple[str, ...], fused: Any) -> bool:
    """Return True if a forward has the results and gradients of that of a layer."""
    original = rewritten.plain_forward(original_class(type(module)))
    width = len(getattr(module, names[0]).weight)
    weights = [evenly(-1 + i, 2 - i, width) for i, _ in enumerate(names)]

    def run(forward: Callable[..., Any], rows: torch.Tensor) -> Any:
        def of(x: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
            inner = {}
            for name, child in module.named_children():
                if name in names:
                    inner[name] = alike(child, {"weight": scales[names.index(name)]})
                elif is_called_so("RMSNorm", child):
                    inner[name] = alike(child, {"weight": evenly(1, 2, width)})
                else:
                    inner[name] = _StandIn(
                        torch.sin if "attn" in name else torch.cos, "attn" in name
                    )
            one = alike(module, {}, inner)
            one.__dict__["training"] = False
            given = {"position_embeddings": None, "attention_mask": None}
            y = forward(one, hidden_states=x, **given)
            result: torch.Tensor = y[0] if isinstance(y, tuple) else y
            return result

        return results_of(of, rows, *weights)

    rows = rows_to_try(width)[1]
    return are_close(run(fused, rows), run(original, rows), rows)
