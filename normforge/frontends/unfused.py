"""Options of `rms_norm` that PyTorch serves, before and after the kernel: a bias, results in other
dtypes, and the addition behind a norm that no kernel adds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..serve.checks import FLOATS


def add_bias(results: Any, bias: torch.Tensor, weight: torch.Tensor | None) -> Any:
    """Return y or (y, h) with a bias added to y. Raises TypeError or ValueError for one that does
    not fit the weight and y."""
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


def norm_then_add(forward: Callable[..., Any], *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return r + norm(x), where the norm is rounded before it is added, and rstd. forward: of the
    norm; given: x, r, weight, eps and weight_offset."""
    x, r, weight, eps, weight_offset = given
    y, rstd = forward(x, weight, eps, weight_offset)
    return r + y, rstd


def widened(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    residual_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return x and the residual in dtypes that hold the results. What is no tensor of such a dtype
    stays as it is: the norm refuses it. Raises TypeError or ValueError for a dtype that cannot be
    had."""
    for name, dtype in (("out_dtype", out_dtype), ("residual_dtype", residual_dtype)):
        if dtype is not None and dtype not in FLOATS:
            known = ", ".join(map(str, FLOATS))
            raise TypeError(f"{name} must be one of {known}, got {dtype}")
    if out_dtype is not None:
        x = _wide(x, out_dtype)
    if residual_dtype is not None:
        if residual is None:
            raise ValueError("residual_dtype needs a residual")
        residual = _wide(residual, residual_dtype)
        dtype = residual.dtype if isinstance(residual, torch.Tensor) else residual_dtype
        if dtype in FLOATS and dtype != residual_dtype:
            raise ValueError(f"residual_dtype {residual_dtype} cannot hold the residual, {dtype}")
    return x, residual


def _wide(tensor: Any, dtype: torch.dtype) -> Any:
    if isinstance(tensor, torch.Tensor) and tensor.dtype not in FLOATS:
        return tensor
    # torch.fx traces with objects that are no tensors.
    if not hasattr(type(tensor), "__torch_function__"):
        return tensor
    return tensor.to(torch.promote_types(tensor.dtype, dtype))


def with_dtype(results: Any, out_dtype: torch.dtype | None) -> Any:
    """Return y or (y, h) with y rounded to a dtype."""
    if out_dtype is None:
        return results
    if isinstance(results, tuple):
        return (results[0].to(out_dtype), *results[1:])
    return results.to(out_dtype)
