"""LayerNorm's forward: by the kernels of its packages, and by PyTorch where they serve no call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..native.native import Native
from ..operations import LAYERNORM_FORWARD
from ..serve.checks import check_forward
from ..serve.collect import collecting
from ..serve.kernels import Source, source_of
from ..serve.reference import wide_dtype
from ..table import TABLE
from ..torch_internals import float_of, served_dtype
from .row_functions import ForwardKernels, ForwardPackage

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""y, and mean and rstd of every row."""
ByKernel = Callable[..., "Results | None"]
"""Computes the results of (rows, weight, bias, eps), or returns None where no kernel does."""


class LayerNormKernels(ForwardKernels):
    """The forward by the kernels of this operation."""

    _native: Native

    def __init__(self, package: Path | None, native: Native) -> None:
        """package: of the backward, beside which that of the forward is; native: its C++."""
        super().__init__(LAYERNORM_FORWARD, lambda: _beside(package), native)

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
    ) -> Results | None:
        """See ByKernel. The arguments fit together."""
        if self._native.forward is not None:
            served = self._native.forward(x, weight, bias, eps)
            if served is not None:
                return served  # type: ignore[return-value]
        shared = [one for one in (weight, bias) if one is not None]
        recorder = collecting.recorder
        if recorder is not None:
            recorder.count(LAYERNORM_FORWARD.name, x, shared[0] if shared else None)
        if not self.may_serve(x):
            return None
        if len(shared) == 2 and shared[0].dtype != shared[1].dtype:
            weight, bias = (one.float() for one in shared)
        given = {"x": x, "weight": weight, "bias": bias, "eps": eps}
        found = self.server.by_kernel(given)
        return None if isinstance(found, str) else (found["y"], found["mean"], found["rstd"])


def _beside(package: Path | None) -> Source | str:
    name = LAYERNORM_FORWARD.name
    if package is None or not (package.parent / name / TABLE).is_file():
        return f"there is no package of {name}"
    return source_of(package.parent / name, name)


def no_kernel(*_: Any) -> None:
    """Serve no call."""


def layer_norm_forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    package: str = "",
    *,
    by_kernel: ByKernel = no_kernel,
) -> tuple[torch.Tensor, ...]:
    """Return y of x's dtype, mean and rstd of every row in fp32 (in float64 for float64), and x +
    residual in the residual's dtype, without one an empty tensor. Without a kernel it is
    differentiable. package: as of the operator; any gives the same. Raises TypeError or
    ValueError."""
    check_forward(x, weight, residual, bias=bias, heads=False)
    stream = x.new_empty(0) if residual is None else (x + residual).to(residual.dtype).contiguous()
    rows = x if residual is None else stream
    found = by_kernel(rows, weight, bias, eps)
    if found is not None:
        return found[0].to(x.dtype), *found[1:], stream
    scales: list[torch.Tensor | None] = [weight, bias]
    # PyTorch's kernel takes one dtype, and on the CPU rounds mean and rstd to it.
    if not rows.is_cuda or any(p is not None and p.dtype != rows.dtype for p in scales):
        compute = wide_dtype(rows)
        rows, scales = rows.to(compute), [None if p is None else p.to(compute) for p in scales]
    y, mean, rstd = torch.ops.aten.native_layer_norm(rows, rows.shape[-1:], *scales, eps)
    return y.to(x.dtype), mean, rstd, stream


class LayerNormForwardPackage(ForwardPackage):
    """The functions of a package of this forward."""

    operation = LAYERNORM_FORWARD.name

    def explain(
        self, M: int, N: int, dtype: str | torch.dtype, weight_dtype: str | torch.dtype = ""
    ) -> dict[str, Any]:
        """Say which kernel serves M aligned rows of N columns ("bf16", "fp16" or "fp32"), and
        why."""
        return self._server.explain(M, N, dtype, weight_dtype)

    def layer_norm_forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        eps: float = 1e-5,
    ) -> Results:
        """Return (y, mean, rstd) of y = (x - mean) * rstd * weight + bias, which
        `layer_norm_backward` takes, with rstd = 1 / sqrt(var(x) + eps). mean and rstd are fp32. No
        gradient flows through the results."""
        shared = {"weight": served_dtype(weight, x), "bias": served_dtype(bias, x)}
        found = self._server({"x": x, **shared, "eps": float_of(eps)})
        return found["y"], found["mean"], found["rstd"]
