"""The operators of a package: what torch.compile, tracers, checkpointing and DTensor see of it.

They are functional: nothing is mutated and no result is an argument. Their namespace has the
package's digest in its name, so a graph that was compiled with one package, and every cache of it,
is never taken for that of another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from ..serve.options import Arguments, Options
from ..serve.reference import Results
from ..torch_internals import tangents_active
from .differentiable import differentiable_backward

# DTensor remembers the shardings of an operator by its tensors, and by what stands behind the first
# integer in its schema, which a dtype is: so `dw_dtype` comes before the rest.
SCHEMAS = {
    "rms_norm": "(Tensor x, Tensor? weight, float? eps, float weight_offset) -> (Tensor, Tensor)",
    "add_rms_norm": "(Tensor x, Tensor residual, Tensor? weight, float? eps, float weight_offset)"
    " -> (Tensor, Tensor, Tensor)",
    "rms_norm_backward": "(Tensor dy, Tensor x, Tensor rstd, Tensor? weight, Tensor? dresidual,"
    " ScalarType? dw_dtype, float weight_offset, bool need_dx, bool need_dw)"
    " -> (Tensor, Tensor, Tensor)",
}


class NormArguments(NamedTuple):
    """What the gradients of a norm depend on beside tensors."""

    eps: float | None
    weight_offset: float


class Operators:
    """The operators of one package, registered when this is constructed and for the life of the
    process.

    forward(x, weight, eps, weight_offset, residual) gives (y, rstd[, residual_out]);
    backward(arguments, options) is `rmsnorm_backward`; neither may call an operator again.
    """

    def __init__(
        self,
        digest: str,
        forward: Callable[..., tuple[torch.Tensor, ...]],
        backward: Callable[[Arguments, Options], Results],
    ) -> None:
        self._forward, self._backward = forward, backward
        self._library, self.namespace = _own_library(f"normforge_{digest}")
        for name, schema in SCHEMAS.items():
            self._library.define(name + schema)
            for device in ("CPU", "CUDA"):
                self._library.impl(name, getattr(self, f"_{name}"), device)
            torch.library.register_fake(
                f"{self.namespace}::{name}", globals()[f"_fake_{name}"], lib=self._library
            )
        namespace = getattr(torch.ops, self.namespace)
        self.rms_norm = namespace.rms_norm.default
        self.add_rms_norm = namespace.add_rms_norm.default
        self.rms_norm_backward = namespace.rms_norm_backward.default
        for name, backward_of, save in (
            ("rms_norm", self._grad_of_norm, _save_norm),
            ("add_rms_norm", self._grad_of_add_norm, _save_add_norm),
            ("rms_norm_backward", _refuse, None),
        ):
            torch.library.register_autograd(
                f"{self.namespace}::{name}", backward_of, setup_context=save, lib=self._library
            )

    def backward(self, given: Arguments, options: Options) -> Results:
        """`rmsnorm_backward` through the operator. `dw_out` is written by operators of PyTorch,
        which a tracer understands."""
        dw_out, dw_dtype = given.dw_out, options.dw_dtype
        if dw_out is not None:
            narrow = options.accumulate and dw_out.dtype != torch.float64
            dw_dtype = torch.float32 if narrow else dw_out.dtype
        need_dw = options.need_dw and given.weight is not None
        # What is compiled would ask at once for the gradient that is refused.
        with torch.no_grad() if is_dynamo_compiling() else nullcontext():
            dx, dw, third = self.rms_norm_backward(
                *(given.dy, given.x, given.rstd, given.weight, given.dresidual),
                *(dw_dtype, options.weight_offset, options.need_dx, need_dw),
            )
        if dw_out is not None:
            with torch.no_grad():
                dw = dw_out.add_(dw) if options.accumulate else dw_out.copy_(dw)
        found = (dx if options.need_dx else None, dw if need_dw else None)
        if given.dresidual is None:
            return found
        return (*found, dx if given.dresidual.dtype == given.x.dtype else third)

    # ---- What runs ---------------------------------------------------------------------------

    def _rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor | None, eps: float | None, weight_offset: float
    ) -> tuple[torch.Tensor, ...]:
        return self._forward(x, weight, eps, weight_offset, None)

    def _add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float | None,
        weight_offset: float,
    ) -> tuple[torch.Tensor, ...]:
        return self._forward(x, weight, eps, weight_offset, residual)

    def _rms_norm_backward(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        rstd: torch.Tensor,
        weight: torch.Tensor | None,
        dresidual: torch.Tensor | None,
        dw_dtype: torch.dtype | None,
        weight_offset: float,
        need_dx: bool,
        need_dw: bool,
    ) -> tuple[torch.Tensor, ...]:
        given = Arguments(dy, x, rstd, weight, dresidual)
        options = Options(weight_offset, need_dx, need_dw, False, dw_dtype)
        dx, dw, *third = self._backward(given, options)
        other = third[0] if dresidual is not None and dresidual.dtype != x.dtype else None
        none = x.new_empty(0)
        return tuple(none.clone() if result is None else result for result in (dx, dw, other))

    # ---- Gradients ---------------------------------------------------------------------------

    def _grad_of_norm(self, ctx: Any, dy: Any, _: Any) -> tuple[Any, ...]:
        x, weight, rstd = ctx.saved_tensors
        dx, dw = self.gradients(ctx, ctx.needs_input_grad[:2], dy, x, weight, rstd, None)
        return dx, dw, None, None

    def _grad_of_add_norm(self, ctx: Any, dy: Any, _: Any, dstream: Any) -> tuple[Any, ...]:
        return *self.gradients_of_sum(ctx, ctx.needs_input_grad[:3], dy, dstream), None, None

    def gradients_of_sum(
        self,
        ctx: Any,
        needs: Sequence[bool],
        dy: torch.Tensor | None,
        dstream: torch.Tensor | None,
        backward: Callable[[Arguments, Options], Results] | None = None,
    ) -> tuple[Any, ...]:
        """Gradients of x, residual and weight where x + residual was normalised. needs: which of
        the three are wanted; backward: as in `gradients`."""
        stream, weight, rstd = ctx.saved_tensors
        needs_x, needs_residual, needs_dw = needs
        wanted = (needs_x or needs_residual, needs_dw)
        dstream, dw = self.gradients(ctx, wanted, dy, stream, weight, rstd, dstream, backward)
        dx = None if dstream is None else dstream.to(ctx.x_dtype)
        return dx, dstream, dw

    def gradients(
        self,
        norm: Any,
        wanted: tuple[bool, bool],
        dy: torch.Tensor | None,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        rstd: torch.Tensor,
        dresidual: torch.Tensor | None,
        backward: Callable[[Arguments, Options], Results] | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """dx and dw of a node, dx in x's dtype. norm: has eps and weight_offset, as a node's
        context and NormArguments do; backward: what computes them, by default the operator."""
        backward = backward or self.backward
        need_dx, need_dw = wanted[0], wanted[1] and weight is not None
        if dy is None:
            return (dresidual if need_dx else None), None
        dy = dy.to(x.dtype)
        if dresidual is not None:
            dresidual = dresidual.to(x.dtype)
        if torch.is_grad_enabled() or tangents_active():  # create_graph=True, or forward mode
            return differentiable_backward(
                dy, x, weight, norm.eps, norm.weight_offset, dresidual, need_dx, need_dw
            )
        # Rows that a wider residual made wide keep the weight they had.
        wide = weight is not None and weight.dtype not in (x.dtype, torch.float32)
        scale = weight.float() if wide and weight is not None else weight
        given = Arguments(dy, x, rstd, scale, dresidual if need_dx else None)
        dx, dw, *_ = backward(given, Options(norm.weight_offset, need_dx, need_dw))
        return dx, dw.to(weight.dtype) if wide and dw is not None and weight is not None else dw


def _own_library(wanted: str) -> tuple[torch.library.Library, str]:
    """A namespace nobody has: a second copy of a package in one process gets a number."""
    number = 1
    while True:
        namespace = wanted if number == 1 else f"{wanted}_{number}"
        try:
            return torch.library.Library(namespace, "DEF"), namespace
        except RuntimeError as error:
            if not re.search("single TORCH_LIBRARY", str(error)):
                raise
        number += 1


def _refuse(ctx: Any, *_: Any) -> Any:
    raise RuntimeError(
        "rmsnorm_backward has no gradient of its own: differentiate rms_norm, which serves "
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
    error, not a gradient in which this call is missing. `dw_out` is left as it is."""
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
    """Whether somebody may ask for the gradient of dx or dw. A weight alone that wants one does not
    count: dw does not depend on it, and dx is of no use where x wants no gradient."""
    return torch.is_grad_enabled() and any(
        isinstance(tensor, torch.Tensor) and tensor.requires_grad
        for tensor in (given.dy, given.x, given.dresidual)
    )


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    x, weight, ctx.eps, ctx.weight_offset = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _save_add_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    x, _, weight, ctx.eps, ctx.weight_offset = inputs
    ctx.x_dtype = x.dtype
    ctx.save_for_backward(output[2], weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


# ---- What the results look like -----------------------------------------------------------------


def _rstd_like(x: torch.Tensor) -> torch.Tensor:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty((*x.shape[:-1], 1), dtype=wide)


def _fake_rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float | None, weight_offset: float
) -> tuple[torch.Tensor, ...]:
    return x.new_empty(x.shape), _rstd_like(x)


def _fake_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float | None,
    weight_offset: float,
) -> tuple[torch.Tensor, ...]:
    return x.new_empty(x.shape), _rstd_like(x), residual.new_empty(x.shape)


def _fake_rms_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    dresidual: torch.Tensor | None,
    dw_dtype: torch.dtype | None,
    weight_offset: float,
    need_dx: bool,
    need_dw: bool,
) -> tuple[torch.Tensor, ...]:
    dx, dw, third = (x.new_empty(0) for _ in range(3))
    if need_dx:
        dx = x.new_empty(x.shape)
    if need_dw and weight is not None:
        dw = weight.new_empty(weight.shape, dtype=dw_dtype or weight.dtype)
    if dresidual is not None and dresidual.dtype != x.dtype:
        third = dresidual.new_empty(x.shape)
    return dx, dw, third
