"""The gradients of a norm, and what gives them to the operators of a package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..serve.options import Arguments, Backward, Options, options_for
from ..serve.reference import Results, norm_formula
from ..torch_internals import (
    PLAIN_KEYS,
    has_tangent,
    is_batched,
    is_plain,
    transforms_active,
    watched,
    without_inference,
)
from .differentiable import differentiable_backward
from .dtensor import register_sharding
from .library import Implementation
from .unfused import norm_then_add


def is_watched(dy: torch.Tensor | None, dstream: torch.Tensor | None = None) -> bool:
    """Return True if somebody sees the operators of a node's backward, or wants a gradient of its
    own."""
    # A gradient may be a subclass though x was none, such as a collective's result that has not
    # arrived.
    return (
        watched()
        or torch.is_grad_enabled()
        or not is_plain(dy)
        or (dstream is not None and not is_plain(dstream))
    )


def gradients(
    backward: Backward,
    eps: float | None,
    weight_offset: float,
    wanted: tuple[bool, bool],
    dy: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    dresidual: torch.Tensor | None = None,
    mean: torch.Tensor | None = None,
    seen: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return dx and dw of a node, dx in x's dtype. backward: what computes them; wanted: whether dx
    and dw are; mean: of a norm that takes it off; seen: `is_watched`, where that was asked."""
    need_dx, need_dw = wanted[0], wanted[1] and weight is not None
    if dy is None:
        return (dresidual if need_dx else None), None
    dy = dy.to(x.dtype)
    if dresidual is not None:
        dresidual = dresidual.to(x.dtype)
    by_pytorch = seen and (
        torch.is_grad_enabled()  # create_graph=True
        or (not is_dynamo_compiling() and transforms_active())
        or has_tangent(dy, x, weight, dresidual)
    )
    if not by_pytorch:
        scale = weight
        if weight is not None and weight.dtype not in (x.dtype, torch.float32):
            scale = weight.float()  # a wider residual made the rows wider than it
        given = Arguments(dy, x, rstd, scale, dresidual if need_dx else None, mean=mean)
        options = options_for(eps, weight_offset, need_dx, need_dw)
        try:
            dx, dw, *_ = backward(given, options)
        except RuntimeError:
            # A batched gradient (is_grads_batched=True) has no address that a kernel could read.
            if not (is_batched(dy) or (dresidual is not None and is_batched(dresidual))):
                raise
        else:
            if scale is not weight and weight is not None and dw is not None:
                dw = dw.to(weight.dtype)
            return dx, dw
    return differentiable_backward(
        dy, x, weight, eps, weight_offset, dresidual, need_dx, need_dw, centred=mean is not None
    )


def gradients_of_sum(
    backward: Backward,
    ctx: Any,
    needs: Sequence[bool],
    dy: torch.Tensor | None,
    dstream: torch.Tensor | None = None,
    seen: bool = True,
) -> tuple[Any, ...]:
    """Return the gradients of x, residual and weight where x + residual, or x alone, was
    normalised. ctx: the node's; needs: which of the three are wanted; backward, seen: as in
    `gradients`."""
    stream, weight, rstd = ctx.saved_tensors
    needs_x, needs_residual, needs_dw = needs
    wanted = (needs_x or needs_residual, needs_dw)
    given = (ctx.eps, ctx.weight_offset, wanted, dy, stream, weight, rstd, dstream)
    dstream, dw = gradients(backward, *given, seen=seen)
    dx = None if dstream is None else dstream.to(ctx.x_dtype)
    return dx, dstream if needs_residual else None, dw


# ---- Of the operators ----------------------------------------------------------------------------
# Kernels for PyTorch's key `Autograd`. Every call of an operator comes through here first, also one
# that a transform of torch.func makes or that a graph makes which was traced under one. They take
# the call's dispatch keys before its arguments. What compiled code calls wants no gradient, and
# nothing is between it and the kernel of its device, `run`, which saves it the dispatcher's way
# there.


def autograd_of_norm(
    operator: Any, run: Implementation, served: Callable[[str], Any]
) -> Implementation:
    """Return the autograd kernel of `rms_norm` and `add_rms_norm`. served: finds what serves a
    package's calls of operators."""

    class OperatorNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> tuple[torch.Tensor, ...]:
            x, weight, ctx.eps, ctx.weight_offset, ctx.package = given[0], *given[-4:]
            results = below_autograd(operator, given)
            rstd, ctx.x_dtype = results[1], x.dtype
            ctx.save_for_backward(x if len(results) == 2 else results[2], weight, rstd)
            of_sum = any(ctx.needs_input_grad[: len(given) - 4])
            ctx.mark_non_differentiable(rstd, *(() if of_sum else results[2:]))
            ctx.set_materialize_grads(False)
            return results

        @staticmethod
        def backward(ctx: Any, dy: Any, _: Any, *dstream: Any) -> tuple[Any, ...]:
            needs_x, *of_residual, needs_dw, _, _, _ = ctx.needs_input_grad
            needs = (needs_x, any(of_residual), needs_dw)
            backward = served(ctx.package).backward
            dx, dresidual, dw = gradients_of_sum(backward, ctx, needs, dy, *dstream)
            return dx, *([dresidual] if dstream else []), dw, None, None, None

    def formula(x: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
        *residual, weight, eps, weight_offset, _ = given
        return norm_formula(x, weight, eps, weight_offset, *residual)

    return autograd_of(operator, run, OperatorNorm, formula)


def autograd_of_norm_and_add(
    operator: Any, run: Implementation, served: Callable[[str], Any]
) -> Implementation:
    """Return the autograd kernel of `rms_norm_and_add`. served: as above."""

    class OperatorNormAndAdd(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> tuple[torch.Tensor, ...]:
            x, _, weight, ctx.eps, ctx.weight_offset, ctx.package = given
            y, rstd = below_autograd(operator, given)
            ctx.x_dtype = x.dtype
            ctx.save_for_backward(x, weight, rstd)
            ctx.mark_non_differentiable(rstd)
            ctx.set_materialize_grads(False)
            return y, rstd

        @staticmethod
        def backward(ctx: Any, dy: Any, _: Any) -> tuple[Any, ...]:
            needs_x, needs_r, needs_dw, *_ = ctx.needs_input_grad
            backward = served(ctx.package).backward
            dx, _, dw = gradients_of_sum(backward, ctx, (needs_x, False, needs_dw), dy)
            return dx, dy if needs_r else None, dw, None, None, None

    def formula(*given: Any) -> tuple[torch.Tensor, ...]:
        return norm_then_add(norm_formula, *given[:-1])

    return autograd_of(operator, run, OperatorNormAndAdd, formula)


def autograd_of(
    operator: Any, run: Implementation, node: type[torch.autograd.Function], formula: Implementation
) -> Implementation:
    """Return the autograd kernel of an operator with this node. formula: the same by operators of
    PyTorch."""

    def kernel(keys: Any, *given: Any) -> tuple[torch.Tensor, ...]:
        plain = _is_plain_call(keys)
        if not plain:  # it may be DTensor's, which may have been imported since
            register_sharding(operator)
        if not plain and (transforms_active() or has_tangent(*given)):
            return formula(*given)  # they see through PyTorch's operators only
        if _want_gradient(given):
            try:
                results: tuple[torch.Tensor, ...] = node.apply(*given)
            except RuntimeError as error:
                results = node.apply(*without_inference(error, *given))
            return results
        return run(*given) if plain else below_autograd(operator, given)

    return kernel


def autograd_of_backward(operator: Any, run: Implementation) -> Implementation:
    """Return the autograd kernel of the backward of a norm. That has no derivative: who asks for
    one gets an error."""

    class OperatorBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> tuple[torch.Tensor, ...]:
            return below_autograd(operator, given)

        backward = staticmethod(_refuse)

    def formula(*given: Any) -> tuple[torch.Tensor, ...]:  # of what a transform or a tangent sees
        if has_tangent(*given) or _want_gradient(given):
            _refuse(None)
        return below_autograd(operator, given)

    return autograd_of(operator, run, OperatorBackward, formula)


def _is_plain_call(keys: Any) -> bool:
    """Return True if autograd and the kernel of the device are all that is left of a call. keys:
    its dispatch keys."""
    return keys.raw_repr() in PLAIN_KEYS and not watched()


def below_autograd(operator: Any, given: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Run the operator on its tensors without autograd."""
    with torch._C._AutoDispatchBelowAutograd():
        results: tuple[torch.Tensor, ...] = operator(*given)
    return results


_NO_TENSORS = frozenset((type(None), bool, int, float, str, torch.dtype))
"""Types of which PyTorch takes a while to say that they are no tensors."""


def _want_gradient(given: tuple[Any, ...]) -> bool:
    if torch.is_grad_enabled():
        for value in given:
            if (
                type(value) not in _NO_TENSORS
                and isinstance(value, torch.Tensor)
                and value.requires_grad
            ):
                return True
    return False


# ---- No second derivative of a backward ----------------------------------------------------------


def _refuse(ctx: Any, *_: Any) -> Any:
    raise RuntimeError(
        "this backward has no gradient of its own: differentiate the norm, which serves "
        "create_graph=True"
    )


class _Refusing(torch.autograd.Function):
    """Results that came of the tensors behind them; their gradient, which nobody computes, is
    refused."""

    @staticmethod
    def forward(
        ctx: Any, results: tuple[torch.Tensor, ...], *_: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        return results

    backward = staticmethod(_refuse)


def without_gradient(
    run: Callable[[Arguments, Options], Results], given: Arguments, options: Options
) -> Results:
    """The results of `run` for tensors that want a gradient: who asks one of them for it gets an
    error, not a gradient in which this call is missing. `dw_out` and `dx_out` are left as they
    are."""
    with torch.no_grad():
        results = run(given, options)
    kept = [id(tensor) for tensor in vars(given).values()]
    fresh = {id(r): r for r in results if r is not None and id(r) not in kept}  # dx may be twice
    if not fresh:
        return results
    asked = (given.dy, given.x, given.rstd, given.weight, given.dresidual)
    marked = dict(zip(fresh, _Refusing.apply(tuple(fresh.values()), *asked), strict=True))
    return tuple(marked.get(id(result), result) for result in results)


def wants_gradient(given: Arguments) -> bool:
    """Return True if somebody may ask for the gradient of dx or dw. A weight alone that wants one
    does not count: dw does not depend on it, and dx is of no use where x wants no gradient."""
    return torch.is_grad_enabled() and any(
        tensor is not None and isinstance(tensor, torch.Tensor) and tensor.requires_grad
        for tensor in (given.dy, given.x, given.dresidual)
    )
