"""The formula in plain PyTorch: serves CPU tensors, and says what the kernels compute."""

from __future__ import annotations

import torch

from ..operations import LAYERNORM_BACKWARD, RMSNORM_BACKWARD
from ..operations.formula import evaluate, wide_dtype

Results = tuple[torch.Tensor | None, ...]


def reference_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    weight_offset: float = 0.0,
    dresidual: torch.Tensor | None = None,
    need_dx: bool = True,
    need_dw: bool = True,
    dw_out: torch.Tensor | None = None,
    accumulate: bool = False,
    dw_dtype: torch.dtype | None = None,
    mean: torch.Tensor | None = None,
    dx_out: torch.Tensor | None = None,
) -> Results:
    """Return dx and dw of y = x * rstd * (weight + weight_offset), rstd = 1 / sqrt(mean(x^2) +
    eps).

    dy, x: (..., N); rstd: one value per row; weight: (N,), or (H, N) with x (..., H, N), or None
    for ones. With xhat = x * rstd and g = dy * (weight + weight_offset):
    dx = rstd * (g - xhat * mean(g * xhat)) + dresidual; dw = sum of dy * xhat over the rows.
    Everything is computed in fp32 (in float64 for float64 inputs) and rounded once at the end.
    dx is contiguous and of x's shape and dtype; dw is of the weight's shape, and of `dw_dtype`, by
    default the weight's. What is not wanted, and dw without a weight, is None. With `dw_out`, dw is
    stored there, or added there with `accumulate` (in fp32 at least, rounded once), and dw_out is
    returned. With `dx_out`, which may be dy, dx is stored there, and dx_out is returned. With
    `dresidual` there is a third result: dx in dresidual's dtype, which is dx itself when that is
    x's.

    With `mean`, of each row, xhat = (x - mean) * rstd, dx is less by rstd * mean(g), and dw has a
    second row: the gradient of a bias, the sum of dy over the rows.
    """
    with torch.no_grad():
        total, dw = backward_formula(
            dy, x, rstd, weight, weight_offset, dresidual, need_dx, need_dw, mean
        )
        dx = third = None
        if total is not None:
            dx = third = total.to(x.dtype).contiguous()
            if dresidual is not None and dresidual.dtype != x.dtype:
                third = total.to(dresidual.dtype).contiguous()
        if dw is not None and weight is not None:
            if dw_out is None:
                dw = dw.to(dw_dtype or weight.dtype)
            else:
                dw = dw_out.copy_(dw_out.to(dw.dtype) + dw if accumulate else dw)
        if dx_out is not None and dx is not None:  # last, as it may be dy
            third = dx_out if third is dx else third
            dx = dx_out.copy_(dx)
    return (dx, dw) if dresidual is None else (dx, dw, third)


def backward_formula(
    dy: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    weight_offset: float,
    dresidual: torch.Tensor | None,
    need_dx: bool,
    need_dw: bool,
    mean: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return dx and dw of `reference_backward` before they are rounded. Differentiable."""
    tensors = {"dy": dy, "x": x, "rstd": rstd, "weight": weight, "dresidual": dresidual}
    operation = RMSNORM_BACKWARD
    if mean is not None:
        operation, tensors["mean"] = LAYERNORM_BACKWARD, mean
    need_dw = need_dw and weight is not None
    wanted = [name for name, needed in (("dx", need_dx), ("dw", need_dw)) if needed]
    found = evaluate(operation, tensors, offset=weight_offset, wanted=wanted)
    return found.get("dx"), found.get("dw")


def reference_forward(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    weight_offset: float = 0.0,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """The formula in plain PyTorch, on any device; arguments and results are `Forward`'s.

    float64 rows are computed in float64 and get an rstd of float64, as PyTorch's do.
    """
    with torch.no_grad():
        return norm_formula(x, weight, eps, weight_offset, residual)


def norm_formula(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float | None,
    weight_offset: float,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Compute `reference_forward`, but differentiable."""
    compute = wide_dtype(x)
    rows = x.to(compute)
    stream = None
    if residual is not None:
        stream = (rows + residual.to(compute)).to(residual.dtype).contiguous()
        rows = stream.to(compute)
    rstd = rstd_of(rows, eps)
    y = (rows * rstd * _effective(weight, weight_offset, compute)).to(x.dtype).contiguous()
    return (y, rstd) if stream is None else (y, rstd, stream)


def rstd_of(rows: torch.Tensor, eps: float | None) -> torch.Tensor:
    """Return the rstd of rows in the dtype that is computed in."""
    mean = rows.square().mean(-1, keepdim=True)
    return torch.rsqrt(mean + (torch.finfo(rows.dtype).eps if eps is None else eps))


def _effective(
    weight: torch.Tensor | None, offset: float, compute: torch.dtype
) -> torch.Tensor | float:
    return 1.0 + offset if weight is None else weight.to(compute) + offset
