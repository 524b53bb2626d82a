"""RMSNorm that is added to a residual stream, y = r + norm(x) * w: `rms_norm(x, w, add=r)`, and the
functions of a package of its forward.

The kernel adds in fp32 and rounds once. Where there is none for a call, the norm is a kernel, or
whatever serves it, and PyTorch adds. The backward is that of the norm; dr is dy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_dynamo_compiling

from ..operations import RMSNORM_ADD_FORWARD
from ..serve.checks import check_forward
from ..serve.kernels import Source
from ..torch_internals import (
    float_of,
    is_plain,
    served_dtype,
    tracing,
    transforms_active,
)
from .dtensor import is_dtensor
from .graph_values import same_size
from .nodes import EagerNormAndAdd
from .row_functions import ForwardKernels, ForwardPackage, asked_of, has_kernel
from .row_nodes import applied, is_seen
from .unfused import norm_then_add

_FP32_EPS = torch.finfo(torch.float32).eps


class NormAndAdd(ForwardKernels):
    """The forward by the kernels of this operation, and by the norm's and an addition where those
    serve no call.

    source: as of ForwardKernels. forward: of the norm.
    """

    def __init__(self, source: Callable[[], Source | str], forward: Callable[..., Any]) -> None:
        super().__init__(RMSNORM_ADD_FORWARD, source)
        self._forward = forward

    def serves(self, x: torch.Tensor, weight: torch.Tensor | None, offset: bool) -> bool:
        """Return True if there is a kernel for rows like x, which may be a fake of sizes that
        tracing does not know."""
        asked = asked_of(x, weight)
        if asked is None or self.missing:
            return False
        scale = x if weight is None else weight
        return same_size(scale.shape[-1], asked[1]) and self.has_kernel(*asked, offset)

    def has_kernel(self, M: int, N: int, dtype: str, weight_dtype: str, offset: bool) -> bool:
        """Return True if there is a kernel for M rows of N columns of these dtypes, or one without
        the offset for the sum of weight and offset."""
        return has_kernel(self.server, M, N, dtype, weight_dtype, offset=offset)

    def count(self, x: torch.Tensor, weight: torch.Tensor | None, offset: float) -> None:
        """Tell who collects of a call that no kernel serves, for which one may be tuned."""
        if weight is None or weight.dim() == 1:
            self.server.count(x, weight, offset=offset)

    def __call__(
        self,
        x: torch.Tensor,
        r: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float | None,
        weight_offset: float,
    ) -> tuple[torch.Tensor, ...]:
        """Return (y, rstd). weight: of x's dtype or fp32. Raises TypeError or ValueError for
        arguments that do not fit."""
        self.count(x, weight, weight_offset)
        if self.may_serve(x) and (weight is None or weight.dim() == 1):
            number = _FP32_EPS if eps is None else eps
            given = {"x": x, "r": r, "weight": weight, "eps": number}
            found: Any = self.server.again(given, weight_offset)
            if found is None:
                check_forward(x, weight, r)
                found = self.server.by_kernel(given, weight_offset)
            if not isinstance(found, str):
                return found["y"], found["rstd"]
        return norm_then_add(self._forward, x, r, weight, eps, weight_offset)


def check_add(
    x: Any,
    add: Any,
    residual: Any = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
) -> None:
    """Raise TypeError or ValueError, in one sentence, for what cannot be added to the norm of x."""
    if residual is not None:
        raise ValueError("residual is added before the norm and add behind it: give one of them")
    if out_dtype is not None or residual_dtype is not None:
        raise ValueError("y has the dtype of x and add: leave out_dtype and residual_dtype out")
    if not isinstance(x, torch.Tensor):  # the norm says so; torch.fx traces with objects
        return
    if not is_dynamo_compiling() and tracing() is not None:
        return  # a tracer would keep the questions as constants
    if not isinstance(add, torch.Tensor):
        raise TypeError(f"add must be a torch.Tensor, got {type(add).__name__}")
    if add.dtype != x.dtype:
        raise TypeError(f"add must have x's dtype {x.dtype}, got {add.dtype}")
    if add.shape != x.shape:
        raise ValueError(f"add must have x's shape {tuple(x.shape)}, got {tuple(add.shape)}")
    if add.device != x.device:
        raise ValueError(f"add is on {add.device} and x on {x.device}")


def _is_ours(x: Any, weight: Any, add: Any) -> bool:
    """Return True if the operator or a node may take these tensors. Others know the operators of
    the norm and of PyTorch."""
    given = (x, weight, add)
    if not isinstance(x, torch.Tensor):
        return False
    if is_dynamo_compiling():  # it cannot trace the other questions
        return all(map(is_plain, given))
    if transforms_active() or tracing() is not None:
        return False
    return all(is_plain(t) or is_dtensor(t) or isinstance(t, FakeTensor) for t in given)


def norm_and_add(
    norm: Any, x: Any, weight: Any, eps: Any, add: Any, bias: Any, weight_offset: float
) -> Any:
    """Compute `rms_norm` of a package with `add`, which was checked. norm: its `Norm`."""
    served, offset = norm.added, float(weight_offset)
    if served is None or bias is not None or not _is_ours(x, weight, add):
        return add + norm.rms_norm(x, weight, eps, bias=bias, weight_offset=offset)
    eps, weight = float_of(eps), served_dtype(weight, x)
    if is_seen(x):
        operators = norm.operators
        return operators.rms_norm_and_add(x, add, weight, eps, offset, operators.package)[0]
    if not served.may_serve(x):
        y = add + norm.rms_norm(x, weight, eps, weight_offset=offset)
        served.count(x, weight, offset)
        return y
    given = (x, add, weight)
    if not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in given):
        return served(*given, eps, offset)[0]
    return applied(EagerNormAndAdd, norm, *given, eps, offset)


def forward_and_add(
    norm: Any, x: Any, weight: Any, eps: Any, add: Any, weight_offset: float
) -> tuple[torch.Tensor, ...]:
    """Compute `rmsnorm_forward` of a package with `add`, which was checked."""
    offset = float(weight_offset)
    if norm.added is None or not _is_ours(x, weight, add):
        y, rstd = norm.rmsnorm_forward(x, weight, eps, weight_offset=offset)
        return add + y, rstd
    given = (x, add, served_dtype(weight, x), float_of(eps), offset)
    results: tuple[torch.Tensor, ...] = norm.operators.rms_norm_and_add(
        *given, norm.operators.package
    )
    return results


class NormAddPackage(ForwardPackage):
    """The functions of a package of this forward."""

    operation = RMSNORM_ADD_FORWARD.name

    def explain(
        self,
        M: int,
        N: int,
        dtype: str | torch.dtype,
        weight_dtype: str | torch.dtype = "",
        *,
        offset: bool = False,
    ) -> dict[str, Any]:
        """Say which kernel serves M aligned rows of N columns ("bf16", "fp16" or "fp32"), and
        why."""
        return self._server.explain(M, N, dtype, weight_dtype, offset=offset)

    def rmsnorm_forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        eps: float | None = None,
        *,
        add: torch.Tensor,
        weight_offset: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (y, rstd) of y = add + x * rstd * (weight + weight_offset), as `rmsnorm_forward`
        of the packages of RMSNorm does, with `add` in x's shape and dtype. No gradient flows
        through the results."""
        check_add(x, add)
        weight, eps = served_dtype(weight, x), float_of(eps)
        given = {"x": x, "r": add, "weight": weight, "eps": _FP32_EPS if eps is None else eps}
        found = self._server(given, float(weight_offset))
        return found["y"], found["rstd"]
