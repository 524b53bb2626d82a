"""RMSNorm with the rotary embedding behind it, with autograd. Both directions are what a package
serves: in plain eager code by a call, elsewhere by an operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.compiler import is_dynamo_compiling

from ..operations import RMSNORM_ROPE_BACKWARD
from ..operations.formula import evaluate, wide_dtype
from ..operations.rmsnorm_rope import rmsnorm_rope
from .gradients import autograd_of, autograd_of_backward
from .library import Served, define, differentiate
from .row_nodes import applied, is_differentiated, is_ours, is_seen, like_first

Gradients = tuple[torch.Tensor, "torch.Tensor | None"]
"""dx, and dw where there is a weight."""
PackedGradients = tuple[torch.Tensor, "torch.Tensor | None", "torch.Tensor | None"]
"""The gradients of a packed projection, and of the weights of queries and keys that there are."""


class RotatedNorms(Protocol):
    """The interface of what computes a package's rotated norms. x, dy: (..., H, N); cos, sin: (...,
    1, R / 2), where the first R columns are rotated, or each R of a row of joined heads; offset:
    added to the weight."""

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        eps: float,
        offset: float,
    ) -> torch.Tensor: ...

    def backward(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        eps: float,
        offset: float,
    ) -> Gradients: ...

    def rotate(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float
    ) -> torch.Tensor: ...

    def forward_packed(self, *given: Any) -> tuple[torch.Tensor, torch.Tensor]: ...

    def backward_packed(self, *given: Any) -> PackedGradients: ...

    def retire(self) -> None: ...

    def of_form(self, form: str) -> Any: ...


SERVED: Served[RotatedNorms] = Served()
FORMS = ("joined", "interleaved")
"""The forms of a package, which are flags of its operations: a row is several heads; neighbouring
columns are pairs, and not those of two halves. A name may have both behind it, in this order."""
_ARGUMENTS = (
    "Tensor x, Tensor? weight, Tensor cos, Tensor sin, float eps, float weight_offset, str package"
)


def _run(*given: Any) -> Any:
    *call, package = given
    # The result is contiguous, as `like_first` says, whatever the strides of the rows.
    return SERVED(package).forward(*call).contiguous()


def _run_backward(*given: Any) -> tuple[torch.Tensor, ...]:
    *call, package = given
    dx, dw = SERVED(package).backward(*call)
    return dx.contiguous(), call[1].new_empty(0) if dw is None else dw


def _fake_backward(*given: Any) -> tuple[torch.Tensor, ...]:
    _, x, weight, *_ = given
    dw = x.new_empty(0) if weight is None else weight.new_empty(weight.shape)
    return x.new_empty(x.shape), dw


rms_norm_rope_forward = define("rms_norm_rope", f"({_ARGUMENTS}) -> Tensor", _run, like_first)
rms_norm_rope_backward = define(
    "rms_norm_rope_backward",
    f"(Tensor dy, {_ARGUMENTS}) -> (Tensor, Tensor)",
    _run_backward,
    _fake_backward,
)


def flags_of(package: str) -> dict[str, bool]:
    """Return the flags that the name of a package's form stands for."""
    base, _, last = package.rpartition("+")
    return {**flags_of(base), last: True} if base and last in FORMS else {}


def formula(
    x: Any, weight: Any, cos: Any, sin: Any, eps: float, offset: float, **flags: bool
) -> torch.Tensor:
    """Compute y in x's dtype, computed in fp32 (in float64 for float64) and rounded once.
    Differentiable. Arguments are as of RotatedNorms, and the flags of a form."""
    compute = wide_dtype(x)
    scale = (1.0 if weight is None else weight.to(compute)) + offset
    y = rmsnorm_rope(x.to(compute), scale, cos.to(compute), sin.to(compute), eps, **flags)
    rounded: torch.Tensor = y.to(x.dtype)
    return rounded


def gradients_by_formula(
    dy: Any,
    x: Any,
    weight: Any,
    cos: Any,
    sin: Any,
    eps: float,
    offset: float,
    **flags: bool,
) -> Gradients:
    """Compute the gradients by PyTorch's operators. Differentiable. Arguments are as of
    `formula`."""
    given = {"dy": dy, "x": x, "weight": weight, "cos": cos, "sin": sin, "eps": eps, **flags}
    found = evaluate(RMSNORM_ROPE_BACKWARD, given, offset=offset)
    return found["dx"].to(x.dtype), None if weight is None else found["dw"].to(weight.dtype)


def _forward(*given: Any) -> torch.Tensor:
    """Return y without gradients, of tensors that `is_ours` has seen."""
    *call, package = given
    y: torch.Tensor
    if is_seen(*call):
        y = rms_norm_rope_forward(*given)
    else:
        y = SERVED(package).forward(*call)
    return y


class RotatedNode(torch.autograd.Function):
    """A call of `_forward`."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:
        x, weight, cos, sin, *ctx.rest = given
        ctx.save_for_backward(x, weight, cos, sin)
        return _forward(*given)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        *numbers, package = ctx.rest
        given = (dy, *ctx.saved_tensors, *numbers)
        if is_differentiated(dy):
            dx, dw = gradients_by_formula(*given, **flags_of(package))
        elif is_seen(dy):
            dx, dw = rms_norm_rope_backward(*given, package)
        else:
            dx, dw = SERVED(package).backward(*given)
        return dx, dw if ctx.needs_input_grad[1] else None, *(None,) * 5


def rotated_norm(*given: Any) -> torch.Tensor:
    """Compute `formula` as a package serves it, of the arguments of RotatedNorms and the package's
    name; by PyTorch's operators where it does not."""
    *call, package = given
    if not is_ours(*call[:4]):
        return formula(*call, **flags_of(package))
    # Autograd of an operator sees changes in place of what it saves; Dynamo's of a node does not.
    if not torch.is_grad_enabled() or is_dynamo_compiling():
        return _forward(*given)
    y: torch.Tensor = applied(RotatedNode, *given)
    return y


def or_by_formula(
    kernel: Callable[..., Any], by_formula: Callable[..., Any], angles: slice
) -> Callable[..., Any]:
    """Return the autograd kernel of an operator whose cos and sin, at these places, may be learnt:
    only PyTorch's operators have their gradients."""

    def autograd(keys: Any, *given: Any) -> Any:
        learnt = any(one.requires_grad for one in given[angles])
        if learnt and torch.is_grad_enabled():
            return by_formula(*given)
        return kernel(keys, *given)

    return autograd


def by_formula(*given: Any) -> Any:
    """Compute a call of the node by PyTorch's operators, of its arguments. Differentiable."""
    return formula(*given[:-1], **flags_of(given[-1]))


_kernel = autograd_of(rms_norm_rope_forward, _run, RotatedNode, by_formula)


differentiate(rms_norm_rope_forward, or_by_formula(_kernel, by_formula, slice(2, 4)))
differentiate(rms_norm_rope_backward, autograd_of_backward(rms_norm_rope_backward, _run_backward))
