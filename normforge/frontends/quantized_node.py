"""RMSNorm that is quantized to FP8, with autograd. The forward is what a package serves, and the
backward that of RMSNorm: in plain eager code by a call, elsewhere by an operator."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch.compiler import is_dynamo_compiling

from ..operations import FORMATS, RowOperation
from ..operations.formula import evaluate, quantized_like, wide_dtype
from ..torch_internals import is_batched, is_plain, transforms_active, watched
from .differentiable import differentiable_backward
from .library import Served, define
from .row_nodes import applied, is_ours

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""y8, its scales, rstd, and y, without elements where a call does not keep it."""
Gradients = tuple["torch.Tensor | None", "torch.Tensor | None"]
"""dx, and dw where there is a weight."""


class Call(NamedTuple):
    """The arguments of a call behind x and the weight. form: of FORMATS; rounded: whether y is
    rounded to x's dtype before it is quantized; powers: whether scales in fp32 are powers of
    two."""

    eps: float
    offset: float
    form: str
    keep_y: bool
    rounded: bool
    powers: bool


class QuantizedNorms(Protocol):
    """The interface of what computes a package's quantized norms."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None, call: Call) -> Results: ...

    def backward(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        rstd: torch.Tensor,
        eps: float,
        offset: float,
    ) -> Gradients: ...

    def backward_quantized(self, given: Any, call: Any) -> Any: ...

    def retire(self) -> None: ...

    def of_form(self, form: str) -> Any: ...


SERVED: Served[QuantizedNorms] = Served()


def _run(x: Any, weight: Any, *given: Any) -> Any:
    *call, package = given
    return SERVED(package).forward(x, weight, Call(*call))


def _fake(x: Any, weight: Any, *given: Any) -> Any:
    *others, _ = given
    call = Call(*others)
    y8, scales = quantized_like(FORMATS[call.form].signature, x).values()
    return (
        y8,
        scales,
        x.new_empty((*x.shape[:-1], 1), dtype=wide_dtype(x)),
        x.new_empty(x.shape if call.keep_y else 0),
    )


def _run_backward(*given: Any) -> tuple[torch.Tensor, ...]:
    *call, package = given
    dx, dw = SERVED(package).backward(*call)
    nothing = call[1].new_empty(0)
    return nothing if dx is None else dx.contiguous(), nothing.clone() if dw is None else dw


def _fake_backward(*given: Any) -> tuple[torch.Tensor, ...]:
    _, x, weight, _, _, _, need_dx, need_dw, _ = given
    dw = weight.new_empty(weight.shape) if need_dw else x.new_empty(0)
    return x.new_empty(x.shape if need_dx else 0), dw


rms_norm_quantized_forward = define(
    "rms_norm_quantized",
    "(Tensor x, Tensor? weight, float eps, float weight_offset, str format, bool keep_y,"
    " bool rounded, bool powers, str package) -> (Tensor, Tensor, Tensor, Tensor)",
    _run,
    _fake,
)
rms_norm_quantized_backward = define(
    "rms_norm_quantized_backward",
    "(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, float eps, float weight_offset,"
    " bool need_dx, bool need_dw, str package) -> (Tensor, Tensor)",
    _run_backward,
    _fake_backward,
)


def numbers_of(operation: RowOperation, call: Any) -> dict[str, float]:
    """Return the numbers that an operation takes, by name, of a call with attributes that are
    called so, True and False as 1 and 0."""
    found = {tensor.name: getattr(call, tensor.name) for tensor in operation.signature.numbers}
    return {name: float(one) if isinstance(one, bool) else one for name, one in found.items()}


def formula(x: Any, weight: Any, call: Call) -> Results:
    """Compute a call by PyTorch's operators. y is differentiable."""
    operation = FORMATS[call.form]
    given = {"x": x, "weight": weight, **numbers_of(operation, call)}
    found = evaluate(operation, given, offset=call.offset)
    y8, scales, rstd = (found[name].detach() for name in ("y8", "y_scales", "rstd"))
    # Not x.new_empty, which jagged tensors do not have.
    nothing = torch.empty(0, dtype=x.dtype, device=x.device)
    return y8, scales, rstd, found["y"].to(x.dtype) if call.keep_y else nothing


def _forward(x: Any, weight: Any, call: Call, package: str) -> Results:
    """Compute a call without gradients, of tensors that `is_ours` has seen."""
    found: Results
    if is_dynamo_compiling() or watched() or not all(map(is_plain, (x, weight))):
        found = rms_norm_quantized_forward(x, weight, *call, package)
    else:
        found = SERVED(package).forward(x, weight, call)
    return found


class QuantizedNode(torch.autograd.Function):
    """A call of `_forward` that keeps y, through which gradients flow."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, *given: Any) -> Results:
        *call, ctx.package = given
        y8, scales, rstd, y = _forward(x, weight, Call(*call), ctx.package)
        ctx.save_for_backward(x, weight, rstd)
        ctx.eps, ctx.offset, *_ = call
        ctx.mark_non_differentiable(y8, scales, rstd)
        ctx.set_materialize_grads(False)
        return y8, scales, rstd, y

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Any, ...]:
        dy = given[-1]
        nothing = (None,) * (len(Call._fields) + 1)
        if dy is None:
            return None, None, *nothing
        x, weight, rstd = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        if not is_dynamo_compiling() and (
            torch.is_grad_enabled() or transforms_active() or is_batched(dy)
        ):
            dx, dw = differentiable_backward(dy, x, weight, ctx.eps, ctx.offset, None, *needs)
        else:
            call = (dy, x, weight, rstd, ctx.eps, ctx.offset, *needs)
            if is_dynamo_compiling() or watched() or not is_plain(dy):
                dx, dw = rms_norm_quantized_backward(*call, ctx.package)
            else:
                dx, dw = SERVED(ctx.package).backward(*call)
        return dx if needs[0] else None, dw if needs[1] else None, *nothing


def quantized_norm(x: Any, weight: Any, call: Call, package: str) -> Results:
    """Compute `formula` as a package serves it; by PyTorch's operators where it does not."""
    if not is_ours(x, weight):
        return formula(x, weight, call)
    if call.keep_y and torch.is_grad_enabled():
        found: Results = applied(QuantizedNode, x, weight, *call, package)
        return found
    with torch.no_grad():
        return _forward(x, weight, call, package)
