"""The calls of rewritten layers: `rms_norm` with the residual stream behind or before the norm."""

from __future__ import annotations

from typing import Any

import torch

from ..torch_internals import PLAIN_TYPES, float_of, served_dtype, watched
from .layer_text import BEFORE, BEHIND, KEPT
from .nodes import EagerNormOfStream
from .patch import ModuleForward, forward_of, served_by
from .rms_norm import Norm
from .row_nodes import applied
from .tried import dtype_by, eps_of, is_hooked


def calls_of(norm: Norm, casting: str) -> dict[str, ModuleForward]:
    """Return the functions by the names under which a rewritten forward calls them. casting: how
    the norms were patched."""
    number, patched = float(casting == "gemma"), forward_of(norm, casting)

    def fits(module: Any, x: Any, r: Any) -> bool:
        """Return True where the module's own forward has results in x's dtype, as `rms_norm` has
        them, and may be left out: it may have been replaced, wrapped or patched otherwise."""
        if not (isinstance(x, torch.Tensor) and isinstance(r, torch.Tensor)):
            return False
        if served_by(module) is not patched or is_hooked(module):
            return False
        dtype = dtype_by(casting, x.dtype, module.weight.dtype)
        return dtype == x.dtype == r.dtype and r.shape == x.shape

    def behind(module: Any, x: Any, r: Any) -> Any:
        if not fits(module, x, r):
            return r + module(x)
        return norm.rms_norm(x, module.weight, eps_of(module), weight_offset=number, add=r)

    def before(module: Any, x: Any, r: Any) -> Any:
        if not fits(module, x, r):
            total = x + r
            return module(total), total
        return norm.rms_norm(x, module.weight, eps_of(module), weight_offset=number, residual=r)

    def kept(module: Any, x: Any) -> Any:
        if not fits(module, x, x):
            return module(x), x
        return norm_of_stream(norm, x, module.weight, eps_of(module), number)

    return {BEHIND: behind, BEFORE: before, KEPT: kept}


def norm_of_stream(
    norm: Norm, x: torch.Tensor, weight: torch.Tensor, eps: float | None, weight_offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of x, and x, whose other uses are to take this one: the backward kernel then
    adds their gradient. In plain eager code alone: the operators of compiled code may not return
    what they take, and there a pass over the graph finds the addition."""
    plain = type(x) in PLAIN_TYPES and type(weight) in PLAIN_TYPES and not watched()
    if not (plain and torch.is_grad_enabled() and x.requires_grad):
        return norm.rms_norm(x, weight, eps, weight_offset=weight_offset), x
    given = (x, served_dtype(weight, x), float_of(eps), weight_offset)
    results: tuple[torch.Tensor, torch.Tensor] = applied(EagerNormOfStream, norm, *given)
    return results
