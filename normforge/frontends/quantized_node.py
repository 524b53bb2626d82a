"""RMSNorm that is quantized to FP8, with autograd. The forward is what a package serves, and the
backward that of RMSNorm: in plain eager code by a call, elsewhere by an operator."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch.compiler import is_dynamo_compiling

from ..operations import FORMATS, RowOperation
from ..operations.formula import evaluate, quantized_like, wide_dtype
from .differentiable import differentiable_backward
from .gradients import autograd_of, below_autograd
from .library import Served, define, differentiate
from .row_nodes import applied, is_differentiated, is_ours, is_seen

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
        total = (x + residual).contiguous()
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
    if is_seen(x, residual, weight):
        return _by_operator(x, residual, weight, call, package)
    return SERVED(package).forward(x, weight, call, residual)


def _by_operator(x: Any, residual: Any, weight: Any, call: Call, package: str) -> Results:
    found: Results
    if residual is None:
        found = rms_norm_quantized_forward(x, weight, *call, package)
    else:
        found = add_rms_norm_quantized_forward(x, residual, weight, *call, package)
    return found


class QuantizedNode(torch.autograd.Function):
    """A call in eager code whose y, or whose sum with a residual, gradients flow through."""

    @staticmethod
    def forward(ctx: Any, x: Any, residual: Any, weight: Any, *given: Any) -> Results:
        *call, package = given
        found = _forward(x, residual, weight, Call(*call), package)
        _save(ctx, x if residual is None else found[-1], weight, given, found)
        return found

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Any, ...]:
        dx, dresidual, dw = _backward(ctx, ctx.needs_input_grad[:3], given)
        return dx, dresidual, dw, *(None,) * (len(Call._fields) + 1)


def _operator_node(operator: Any, tensors: int) -> type[torch.autograd.Function]:
    """Return the node of an operator's calls, whose first arguments are x, a residual where there
    are three tensors, and the weight."""

    class OperatorQuantized(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> Results:
            x, *residual, weight = given[:tensors]
            found = below_autograd(operator, given)
            _save(ctx, found[-1] if residual else x, weight, given[tensors:], found)
            return found

        @staticmethod
        def backward(ctx: Any, *given: Any) -> tuple[Any, ...]:
            needs_x, *of_residual, needs_dw = ctx.needs_input_grad[:tensors]
            dx, *others = _backward(ctx, (needs_x, any(of_residual), needs_dw), given)
            return dx, *others[1 - len(of_residual) :], *(None,) * (len(Call._fields) + 1)

    return OperatorQuantized


def _save(ctx: Any, rows: Any, weight: Any, given: Any, found: Results) -> None:
    """Keep what the backward needs. rows: those that were normalized; given: a call, and the name
    of its package."""
    *call, ctx.package = given
    y8, scales, rstd, *_ = found
    ctx.save_for_backward(rows, weight, rstd)
    ctx.eps, ctx.offset, ctx.keep_y = call[0], call[1], call[3]
    ctx.mark_non_differentiable(y8, scales, rstd)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, needs: Any, given: Any) -> tuple[Any, ...]:
    """Return the gradients of x, a residual and the weight. needs: which of them are wanted; given:
    the gradients of the results."""
    dy, *others = given[3:]
    dtotal = others[0] if others else None
    needs_x, needs_residual, needs_dw = needs
    dx, dw = dtotal, None
    if dy is not None and ctx.keep_y:
        wanted = (needs_x or needs_residual, needs_dw)
        dx, dw = _gradients(ctx, (dy, *ctx.saved_tensors), wanted, dtotal)
    return dx if needs_x else None, dx if needs_residual else None, dw if needs_dw else None


def _gradients(ctx: Any, given: Any, needs: Any, dtotal: Any) -> Gradients:
    """Return dx and dw of dy, x, the weight and rstd. dtotal: the gradient that reaches x by
    another way."""
    dy, x, weight, rstd = given
    need_dx, need_dw = needs
    if is_differentiated(dy, dtotal):
        return differentiable_backward(dy, x, weight, ctx.eps, ctx.offset, dtotal, *needs)
    call = (dy, x, weight, rstd, ctx.eps, ctx.offset, need_dx, need_dw)
    if not is_seen(dy, dtotal):
        return SERVED(ctx.package).backward(*call, dtotal)
    dx, dw = rms_norm_quantized_backward(*call, ctx.package)
    return dx if dtotal is None or not need_dx else dx + dtotal, dw


def quantized_norm(x: Any, weight: Any, call: Call, package: str, residual: Any = None) -> Results:
    """Compute `formula` as a package serves it; by PyTorch's operators where it does not."""
    if not is_ours(x, weight, residual):
        return formula(x, weight, call, residual)
    if is_dynamo_compiling():  # autograd of an operator sees changes in place, and Dynamo's not
        return _by_operator(x, residual, weight, call, package)
    if (call.keep_y or residual is not None) and torch.is_grad_enabled():
        found: Results = applied(QuantizedNode, x, residual, weight, *call, package)
        return found
    with torch.no_grad():
        return _forward(x, residual, weight, call, package)


# ---- Registered once, when this is imported ------------------------------------------------------


def _formula_of_operator(x: Any, weight: Any, *given: Any) -> Results:
    return formula(x, weight, Call(*given[:-1]))


def _formula_of_sum(x: Any, residual: Any, weight: Any, *given: Any) -> Results:
    return formula(x, weight, Call(*given[:-1]), residual)


for _operator, _kernel, _tensors, _by_pytorch in (
    (rms_norm_quantized_forward, _run, 2, _formula_of_operator),
    (add_rms_norm_quantized_forward, _run_of_sum, 3, _formula_of_sum),
):
    _node = _operator_node(_operator, _tensors)
    differentiate(_operator, autograd_of(_operator, _kernel, _node, _by_pytorch))
