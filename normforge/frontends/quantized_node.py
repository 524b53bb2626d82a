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

Results = tuple[torch.Tensor, ...]
"""y8, its scales, rstd, and y, without elements where a call does not keep it; with a residual also
the sum that was normalized."""
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

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        call: Call,
        residual: torch.Tensor | None = None,
    ) -> Results: ...

    def backward(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        rstd: torch.Tensor,
        eps: float,
        offset: float,
        need_dx: bool,
        need_dw: bool,
        dresidual: torch.Tensor | None = None,
    ) -> Gradients: ...

    def backward_quantized(self, given: Any, call: Any) -> Any: ...

    def retire(self) -> None: ...

    def of_form(self, form: str) -> Any: ...


SERVED: Served[QuantizedNorms] = Served()


def _run(x: Any, weight: Any, *given: Any) -> Any:
    *call, package = given
    return SERVED(package).forward(x, weight, Call(*call))


def _run_of_sum(x: Any, residual: Any, weight: Any, *given: Any) -> Any:
    *call, package = given
    return SERVED(package).forward(x, weight, Call(*call), residual)


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


def _fake_of_sum(x: Any, residual: Any, weight: Any, *given: Any) -> Any:
    return *_fake(x, weight, *given), x.new_empty(x.shape)


def _run_backward(*given: Any) -> tuple[torch.Tensor, ...]:
    *call, package = given
    dx, dw = SERVED(package).backward(*call)
    nothing = call[1].new_empty(0)
    return nothing if dx is None else dx.contiguous(), nothing.clone() if dw is None else dw


def _fake_backward(*given: Any) -> tuple[torch.Tensor, ...]:
    _, x, weight, _, _, _, need_dx, need_dw, _ = given
    dw = weight.new_empty(weight.shape) if need_dw else x.new_empty(0)
    return x.new_empty(x.shape if need_dx else 0), dw


_CALL = (
    "Tensor? weight, float eps, float weight_offset, str format, bool keep_y, bool rounded,"
    " bool powers, str package) -> (Tensor, Tensor, Tensor, Tensor"
)
rms_norm_quantized_forward = define("rms_norm_quantized", f"(Tensor x, {_CALL})", _run, _fake)
add_rms_norm_quantized_forward = define(
    "add_rms_norm_quantized",
    f"(Tensor x, Tensor residual, {_CALL}, Tensor)",
    _run_of_sum,
    _fake_of_sum,
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


def formula(x: Any, weight: Any, call: Call, residual: Any = None) -> Results:
    """Compute a call by PyTorch's operators. y and the sum with a residual are differentiable."""
    if residual is not None:
        total = x + residual
        return *formula(total, weight, call), total
    operation = FORMATS[call.form]
    given = {"x": x, "weight": weight, **numbers_of(operation, call)}
    found = evaluate(operation, given, offset=call.offset)
    y8, scales, rstd = (found[name].detach() for name in ("y8", "y_scales", "rstd"))
    # Not x.new_empty, which jagged tensors do not have.
    nothing = torch.empty(0, dtype=x.dtype, device=x.device)
    return y8, scales, rstd, found["y"].to(x.dtype) if call.keep_y else nothing


def _forward(x: Any, residual: Any, weight: Any, call: Call, package: str) -> Results:
    """Compute a call without gradients, of tensors that `is_ours` has seen."""
    found: Results
    if not (is_dynamo_compiling() or watched()) and all(map(is_plain, (x, residual, weight))):
        found = SERVED(package).forward(x, weight, call, residual)
    elif residual is None:
        found = rms_norm_quantized_forward(x, weight, *call, package)
    else:
        found = add_rms_norm_quantized_forward(x, residual, weight, *call, package)
    return found


class QuantizedNode(torch.autograd.Function):
    """A call of `_forward` whose y, or whose sum with a residual, gradients flow through."""

    @staticmethod
    def forward(ctx: Any, x: Any, residual: Any, weight: Any, *given: Any) -> Results:
        *call, ctx.package = given
        y8, scales, rstd, *wide = _forward(x, residual, weight, Call(*call), ctx.package)
        ctx.save_for_backward(x if residual is None else wide[-1], weight, rstd)
        ctx.eps, ctx.offset, ctx.keep_y = call[0], call[1], call[3]
        ctx.mark_non_differentiable(y8, scales, rstd)
        ctx.set_materialize_grads(False)
        return y8, scales, rstd, *wide

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Any, ...]:
        dy, *others = given[3:]
        dtotal = others[0] if others else None
        x, weight, rstd = ctx.saved_tensors
        needs_x, needs_residual, needs_dw = ctx.needs_input_grad[:3]
        needs = (needs_x or needs_residual, needs_dw)
        dx, dw = dtotal, None
        if dy is not None and ctx.keep_y:
            dx, dw = _gradients(ctx, (dy, x, weight, rstd), needs, dtotal)
        given_on = dx if needs_x else None, dx if needs_residual else None, dw if needs_dw else None
        return *given_on, *(None,) * (len(Call._fields) + 1)


def _gradients(ctx: Any, given: Any, needs: Any, dtotal: Any) -> Gradients:
    """Return dx and dw of dy, x, the weight and rstd. dtotal: the gradient that reaches x by
    another way."""
    dy, x, weight, rstd = given
    need_dx, need_dw = needs
    if not is_dynamo_compiling() and (
        torch.is_grad_enabled()
        or transforms_active()
        or is_batched(dy)
        or (dtotal is not None and is_batched(dtotal))
    ):
        return differentiable_backward(dy, x, weight, ctx.eps, ctx.offset, dtotal, *needs)
    call = (dy, x, weight, rstd, ctx.eps, ctx.offset, need_dx, need_dw)
    if not (is_dynamo_compiling() or watched()) and is_plain(dy) and is_plain(dtotal):
        return SERVED(ctx.package).backward(*call, dtotal)
    dx, dw = rms_norm_quantized_backward(*call, ctx.package)
    return dx if dtotal is None or not need_dx else dx + dtotal, dw


def quantized_norm(x: Any, weight: Any, call: Call, package: str, residual: Any = None) -> Results:
    """Compute `formula` as a package serves it; by PyTorch's operators where it does not."""
    if not is_ours(x, weight, residual):
        return formula(x, weight, call, residual)
    if (call.keep_y or residual is not None) and torch.is_grad_enabled():
        found: Results = applied(QuantizedNode, x, residual, weight, *call, package)
        return found
    with torch.no_grad():
        return _forward(x, residual, weight, call, package)
