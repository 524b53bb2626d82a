"""Options of `rms_norm` that PyTorch serves, before and after the kernel: a bias, and results in
other dtypes."""

from __future__ import annotations

from typing import Any

import torch


def add_bias(results: Any, bias: torch.Tensor, weight: torch.Tensor | None) -> Any:
    """y or (y, h) with a bias added to y. Raises TypeError or ValueError for one that does not fit
    the weight and y."""
    y, *stream = results if isinstance(results, tuple) else (results,)
    if isinstance(y, torch.Tensor):  # torch.fx traces with objects that are none
        shape = y.shape[-1:] if weight is None else weight.shape
        if not isinstance(bias, torch.Tensor) or not bias.is_floating_point():
            kind = bias.dtype if isinstance(bias, torch.Tensor) else type(bias).__name__
            raise TypeError(f"bias must be a tensor of a floating dtype, got {kind}")
        if bias.device != y.device:
            raise ValueError(f"bias is on {bias.device} and x on {y.device}")
        if bias.shape not in (shape, shape[-1:]):
            raise ValueError(f"bias must have shape {tuple(shape)}, got {tuple(bias.shape)}")
    y = y + bias.to(y.dtype)
    return (y, *stream) if stream else y


def widened(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    residual_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x and the residual in dtypes that hold the results, so that nothing is rounded before it is
    in the dtype asked for. Raises TypeError or ValueError for a dtype that cannot be had."""
    for name, dtype in (("out_dtype", out_dtype), ("residual_dtype", residual_dtype)):
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"{name} must be a floating torch.dtype, got {dtype}")
    if out_dtype is not None:
        x = x.to(torch.promote_types(x.dtype, out_dtype))
    if residual_dtype is not None:
        if residual is None:
            raise ValueError("residual_dtype needs a residual")
        if torch.promote_types(residual.dtype, residual_dtype) != residual_dtype:
            raise ValueError(f"residual_dtype {residual_dtype} cannot hold {residual.dtype}")
        residual = residual.to(residual_dtype)
    return x, residual


def with_dtype(results: Any, out_dtype: torch.dtype | None) -> Any:
    """y or (y, h) with y rounded to a dtype."""
    if out_dtype is None:
        return results
    if isinstance(results, tuple):
        return (results[0].to(out_dtype), *results[1:])
    return results.to(out_dtype)
