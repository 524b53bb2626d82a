"""Norms and their backward as differentiable operators of PyTorch: for create_graph=True, for
forward mode and for torch.func, whose transforms see through these only."""

from __future__ import annotations

from typing import Any

import torch


def differentiable_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float | None,
    weight_offset: float,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """y and rstd, and x + residual where there is a residual, as the operators define them."""
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = x.to(compute)
    stream = None
    if residual is not None:
        stream = (rows + residual.to(compute)).to(residual.dtype)
        rows = stream.to(compute)
    eps = torch.finfo(compute).eps if eps is None else eps
    scale = 1.0 + weight_offset if weight is None else weight.to(compute) + weight_offset
    rstd = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    y = (rows * rstd * scale).to(x.dtype)
    return (y, rstd) if stream is None else (y, rstd, stream)


def is_foreign(x: Any) -> bool:
    """Whether neither a kernel nor an operator of a package can take this: a nested tensor, or what
    torch.fx traces with, which is no tensor but takes part in PyTorch's functions."""
    if isinstance(x, torch.Tensor):
        return x.is_nested
    return hasattr(type(x), "__torch_function__")


def foreign_norm(
    x: Any, weight: torch.Tensor | None, eps: float | None, weight_offset: float, residual: Any
) -> Any:
    """`rms_norm` by PyTorch's function of that name, with PyTorch's rounding."""
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
    """dx and dw as `reference_backward` has them, but with gradients of their own: rstd is computed
    again from x, and with `centred`, of a norm that takes the mean off, the mean. In fp32 (float64
    for float64), rounded at the end."""
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    wide_x, grad = x.to(compute), dy.to(compute)
    if centred:
        wide_x = wide_x - wide_x.mean(-1, keepdim=True)
    eps = torch.finfo(compute).eps if eps is None else eps
    rstd = torch.rsqrt(wide_x.square().mean(-1, keepdim=True) + eps)
    normalized = wide_x * rstd
    dx = dw = None
    if need_dx:
        scale = 1.0 + weight_offset if weight is None else weight.to(compute) + weight_offset
        weighted = grad * scale
        along = normalized * (weighted * normalized).mean(-1, keepdim=True)
        if centred:
            weighted = weighted - weighted.mean(-1, keepdim=True)
        dx = rstd * (weighted - along)
        if dresidual is not None:
            dx = dx + dresidual.to(compute)
        dx = dx.to(x.dtype)
    if need_dw and weight is not None:
        dw = (grad * normalized).reshape(-1, *weight.shape).sum(0)
        if centred:
            dw = torch.stack((dw, grad.reshape(-1, *weight.shape).sum(0)))
        dw = dw.to(weight.dtype)
    return dx, dw
