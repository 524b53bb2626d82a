"""A gated RMSNorm with autograd. In plain eager code both directions are what a package serves.
Elsewhere the forward is PyTorch's operators, which compilers fuse with what is around them, and the
backward is an operator. A pass over graphs that knows of nothing to fuse puts the operator of the
forward there."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.compiler import is_dynamo_compiling

from ..operations import GATED_BACKWARDS
from ..operations.formula import evaluate, wide_dtype
from ..operations.gated_rmsnorm_backward import gated_rmsnorm
from . import traced_nodes
from .gradients import autograd_of, below_autograd
from .library import Served, define, differentiate
from .row_nodes import applied, is_differentiated, is_ours, is_seen, like_first

Gradients = tuple[torch.Tensor, torch.Tensor, "torch.Tensor | None"]
"""dx, dz, and dw where there is a weight."""


class GatedNorms(Protocol):
    """The interface of what computes a package's gated norms. kind: the activation, and whether the
    norm comes before the gate."""

    def forward(
        self,
        x: torch.Tensor,
        z: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        kind: tuple[str, bool],
    ) -> torch.Tensor: ...

    def backward(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        z: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        kind: tuple[str, bool],
    ) -> Gradients: ...

    def retire(self) -> None: ...

    def of_form(self, form: str) -> Any: ...


SERVED: Served[GatedNorms] = Served()
_ARGUMENTS = (
    "Tensor x, Tensor z, Tensor? weight, float eps, str activation, bool norm_before_gate,"
    " str package"
)


def _run_forward(*given: Any) -> Any:
    x, z, weight, eps, activation, norm_before_gate, package = given
    y = SERVED(package).forward(x, z, weight, eps, (activation, norm_before_gate))
    return y.contiguous()  # as `like_first` says, whatever the strides of the rows


rms_norm_gated_forward = define(
    "rms_norm_gated", f"({_ARGUMENTS}) -> Tensor", _run_forward, like_first
)


def _run(*given: Any) -> tuple[torch.Tensor, ...]:
    dy, x, z, weight, eps, activation, norm_before_gate, package = given
    kind = (activation, norm_before_gate)
    dx, dz, dw = SERVED(package).backward(dy, x, z, weight, eps, kind)
    # Results are contiguous, as `_fake` says, whatever the strides of the rows.
    return dx.contiguous(), dz.contiguous(), x.new_empty(0) if dw is None else dw


def _fake(*given: Any) -> tuple[torch.Tensor, ...]:
    _, x, _, weight, *_ = given
    dw = x.new_empty(0) if weight is None else weight.new_empty(weight.shape)
    return x.new_empty(x.shape), x.new_empty(x.shape), dw


rms_norm_gated_backward = define(
    "rms_norm_gated_backward",
    f"(Tensor dy, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    _run,
    _fake,
)


def formula(
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    kind: tuple[str, bool],
) -> torch.Tensor:
    """Compute y in x's dtype, computed in fp32 (in float64 for float64) and rounded once.
    Differentiable. x, z: rows of shape (..., N); weight: (N,), or (H, N) with rows of shape (...,
    H, N)."""
    compute = wide_dtype(x)
    scale = 1.0 if weight is None else weight.to(compute)
    return gated_rmsnorm(x.to(compute), z.to(compute), scale, eps, *kind).to(x.dtype)


def gradients_by_formula(dy: Any, x: Any, z: Any, weight: Any, eps: float, kind: Any) -> Gradients:
    """The gradients by PyTorch's operators. Differentiable."""
    given = {"dy": dy, "x": x, "z": z, "weight": weight, "eps": eps}
    found = evaluate(GATED_BACKWARDS[kind], given)
    dw = None if weight is None else found["dw"].to(weight.dtype)
    return found["dx"].to(x.dtype), found["dz"].to(x.dtype), dw


def _forward(x: Any, z: Any, weight: Any, eps: float, kind: Any, package: str) -> torch.Tensor:
    """Return y without gradients, of tensors that `is_ours` has seen."""
    if is_seen(x, z, weight):
        return formula(x, z, weight, eps, kind)
    return SERVED(package).forward(x, z, weight, eps, kind)


class GatedNode(torch.autograd.Function):
    """A call of `_forward`. by_formula: such a call by PyTorch's operators."""

    @staticmethod
    def by_formula(*given: Any) -> torch.Tensor:
        return formula(*given[:-1])

    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:
        x, z, weight, ctx.eps, ctx.kind, ctx.package = given
        ctx.save_for_backward(x, z, weight)
        return _forward(*given)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        return *_gradients(ctx, dy), None, None, None


def _gradients(ctx: Any, dy: torch.Tensor) -> tuple[Any, Any, Any]:
    x, z, weight = ctx.saved_tensors
    given = (dy, x, z, weight, ctx.eps)
    if is_differentiated(dy):
        dx, dz, dw = gradients_by_formula(*given, ctx.kind)
    elif is_seen(dy):
        dx, dz, dw = rms_norm_gated_backward(*given, *ctx.kind, ctx.package)
    else:
        dx, dz, dw = SERVED(ctx.package).backward(*given, ctx.kind)
    return dx, dz, dw if ctx.needs_input_grad[2] else None


class OperatorGated(torch.autograd.Function):
    """A call of the operator of the forward."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        x, z, weight, ctx.eps, *kind, ctx.package = given
        ctx.kind = tuple(kind)
        ctx.save_for_backward(x, z, weight)
        return below_autograd(rms_norm_gated_forward, given)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        return *_gradients(ctx, dy), None, None, None, None


def _by_formula(*given: Any) -> Any:
    x, z, weight, eps, activation, norm_before_gate, _ = given
    return formula(x, z, weight, eps, (activation, norm_before_gate))


differentiate(
    rms_norm_gated_forward,
    autograd_of(rms_norm_gated_forward, _run_forward, OperatorGated, _by_formula),
)


def gated_norm(x: Any, z: Any, weight: Any, eps: float, kind: Any, package: str) -> torch.Tensor:
    """Compute `formula` as a package serves it; by PyTorch's operators where it does not."""
    if not is_ours(x, z, weight):
        return formula(x, z, weight, eps, kind)
    if not torch.is_grad_enabled():
        return _forward(x, z, weight, eps, kind, package)
    given = (x, z, weight, eps, kind, package)
    y: torch.Tensor = (
        traced_nodes.gated(*given) if is_dynamo_compiling() else applied(GatedNode, *given)
    )
    return y
