"""Norms and their backward as differentiable operators of PyTorch: for create_graph=True, for
forward mode and for torch.func, whose transforms see through these only."""

from __future__ import annotations

from typing import Any

import torch

from ..serve.reference import backward_formula, rstd_of, wide_dtype


def is_foreign(x: Any) -> bool:
    """Return True if neither a kernel nor an operator of a package can take this: a nested tensor,
    or what torch.fx traces with, which is no tensor but takes part in PyTorch's functions."""
    if isinstance(x, torch.Tensor):
        return x.is_nested
    return hasattr(type(x), "__torch_function__")


def foreign_norm(
    x: Any, weight: torch.Tensor | None, eps: float | None, weight_offset: float, residual: Any
) -> Any:
    """Compute `rms_norm` by PyTorch's function of that name, with PyTorch's rounding."""
    rows = x if residual is None else x + residual
    shape = (x.size(-1) if weight is None else weight.shape[-1],)
    scale = weight + weight_offset if weight is not None and weight_offset else weight
    y = torch.nn.functional.rms_norm(rows, shape, scale, eps)
    if weight is None and weight_offset:
        y = y * (1.0 + weight_offset)
    return y if residual is None else (y, rows)


def differentiable_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float | None,
    weight_offset: float,
    dresidual: torch.Tensor | None,
    need_dx: bool,
    need_dw: bool,
    centred: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return dx and dw as `reference_backward` has them, but with gradients of their own: rstd is
    computed again from x, and with `centred`, of a norm that takes the mean off, the mean. In fp32
    (float64 for float64), rounded at the end."""
    rows, mean = x.to(wide_dtype(x)), None  # once: gradients of two copies would be rounded each
    if centred:
        mean = rows.mean(-1, keepdim=True)
    rstd = rstd_of(rows if mean is None else rows - mean, eps)
    dx, dw = backward_formula(
        dy, rows, rstd, weight, weight_offset, dresidual, need_dx, need_dw, mean
    )
    if dw is not None and weight is not None:
        dw = dw.to(weight.dtype)
    return None if dx is None else dx.to(x.dtype), dw
