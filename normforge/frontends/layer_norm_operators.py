"""LayerNorm's node of autograd, and the operators of a package."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from ..native.kinds import LAYER_NORM
from ..native.native import Native
from ..serve.call import QuickCall
from ..serve.options import DTYPES, SMALLEST_EPS, Backward
from .gradients import (
    autograd_of,
    autograd_of_backward,
    below_autograd,
    gradients,
    is_watched,
)
from .layer_norm_forward import ByKernel, Results, layer_norm_forward, no_kernel
from .layer_norm_routes import LAYER_NORM_ROUTES, dw_and_db
from .library import Implementation, Served, decompose, define, differentiate
from .operators import (
    NormOperators,
    fake_backward,
    implementation_of_backward,
    statistic_like,
)

# The fourth result is the sum, or empty without a residual.
LAYER_NORM_SCHEMAS = {
    "layer_norm": "(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps,"
    " str package) -> (Tensor, Tensor, Tensor, Tensor)",
    "layer_norm_backward": "(Tensor dy, Tensor x, Tensor rstd, Tensor? weight, Tensor? dresidual,"
    " ScalarType? dw_dtype, float weight_offset, bool need_dx, bool need_dw, str package,"
    " Tensor mean) -> (Tensor, Tensor, Tensor)",
}


_ON_CPU = (torch.float32,)
"""The dtypes of rows whose mean and rstd PyTorch's kernel does not round on the CPU."""


def layer_norm_node(
    forward: Implementation,
    backward_of: Callable[[str], Backward],
    quick: QuickCall = lambda *_: None,
) -> type[torch.autograd.Function]:
    """A node around `layer_norm_forward` and what computes gradients for a package. quick: what is
    tried first where nobody watches."""

    class LayerNormNode(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> tuple[torch.Tensor, ...]:
            x, residual, weight, bias, ctx.eps, ctx.package = given
            y, mean, rstd, stream = forward(*given)
            ctx.save_for_backward(x if residual is None else stream, weight, rstd, mean)
            ctx.x_dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype
            of_sum = residual is not None and any(ctx.needs_input_grad[:2])
            ctx.mark_non_differentiable(mean, rstd, *(() if of_sum else (stream,)))
            ctx.set_materialize_grads(False)
            return y, mean, rstd, stream

        @staticmethod
        def backward(ctx: Any, dy: Any, _: Any, __: Any, dstream: Any) -> tuple[Any, ...]:
            needs = ctx.needs_input_grad[:4]
            found = layer_norm_gradients(backward_of(ctx.package), quick, ctx, needs, dy, dstream)
            return *found, None, None

    return LayerNormNode


def forward_of_node(by_kernel: ByKernel) -> Callable[..., Results]:
    """Return the forward of the shortest node: by a kernel, else by PyTorch's."""

    def forward(x: torch.Tensor, *given: Any) -> Results:
        found = by_kernel(x, *given)
        if found is None:
            found = torch.native_layer_norm(x, x.shape[-1:], *given)
        y, mean, rstd = found
        return y.to(x.dtype), mean, rstd  # autocast computes in fp32

    return forward


def gradients_of_node(backward: Backward, quick: QuickCall) -> Callable[..., Any]:
    """Return the function that gives the gradients of x, weight and bias of the shortest node,
    whose bias has x's dtype, in C++."""

    def gradients(
        dy: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        rstd: torch.Tensor,
        mean: torch.Tensor,
        eps: float,
        need_dx: bool,
        need_dw: bool,
        need_db: bool,
    ) -> tuple[torch.Tensor | None, ...]:
        saved = SimpleNamespace(saved_tensors=(x, weight, rstd, mean), eps=eps)
        saved.x_dtype = saved.bias_dtype = x.dtype
        of = (need_dx, False, need_dw, need_db)
        dx, _, dw, db = layer_norm_gradients(backward, quick, saved, of, dy)
        return dx, dw, db

    return gradients


def eager_layer_norm(
    by_kernel: ByKernel, backward: Backward, quick: QuickCall, native: Native
) -> Callable[..., torch.Tensor | None]:
    """Return the function that serves `layer_norm(x, weight, bias, eps)` of plain tensors in the
    shortest way. It gives None for arguments that need more than PyTorch's kernel or do not fit
    together. by_kernel: what computes the forward where it can; backward, quick: as in
    `layer_norm_node`; native: has the node in C++."""
    forward = forward_of_node(by_kernel)

    class EagerLayerNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> torch.Tensor:
            x, weight, bias, ctx.eps = given
            y, mean, rstd = forward(*given)
            ctx.save_for_backward(x, weight, rstd, mean)
            ctx.x_dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype
            ctx.set_materialize_grads(False)
            return y

        @staticmethod
        def backward(ctx: Any, dy: Any) -> tuple[Any, ...]:
            if dy is None:
                return (None,) * 4
            needs_x, needs_dw, needs_db, _ = ctx.needs_input_grad
            needs = (needs_x, False, needs_dw, needs_db)
            dx, _, dw, db = layer_norm_gradients(backward, quick, ctx, needs, dy)
            return dx, dw, db, None

    def call(
        x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor | None:
        if x.is_nested:  # some of which have no shape
            return None
        dtype, size = x.dtype, x.shape[-1:]
        if dtype not in (DTYPES if x.is_cuda else _ON_CPU):
            return None
        scales = 0
        for scale in (weight, bias):
            if scale is not None:
                if (scale.dtype, scale.shape, scale.device) != (dtype, size, x.device):
                    return None
                scales += scale.requires_grad
        if not size or not size[0]:
            return None
        if (x.requires_grad or scales) and torch.is_grad_enabled():
            apply = native.norm or EagerLayerNorm.apply
            return apply(x, weight, bias, eps)
        found = by_kernel(x, weight, bias, eps)
        return torch.layer_norm(x, size, weight, bias, eps).to(dtype) if found is None else found[0]

    return call


def layer_norm_gradients(
    backward: Backward,
    quick: QuickCall,
    ctx: Any,
    needs: tuple[bool, bool, bool, bool],
    dy: torch.Tensor | None,
    dstream: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of x, residual, weight and bias from what a node saved. needs: which are
    wanted."""
    rows, weight, rstd, mean = ctx.saved_tensors
    needs_x, needs_residual, needs_dw, needs_db = needs
    if weight is None and needs_db:
        weight = rows.new_ones(rows.shape[-1], dtype=ctx.bias_dtype)
    scale_dtype = None if weight is None else weight.dtype
    if needs_db and weight is not None and ctx.bias_dtype == torch.float32:
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32))  # db has its dtype
    wanted = (needs_x or needs_residual, needs_dw or needs_db)
    found = None
    usual = dstream is None and ctx.eps >= SMALLEST_EPS
    if all(wanted) and weight is not None and usual and not is_watched(dy):
        found = quick(dy, rows, rstd, weight, mean)
    dx, sums = found or gradients(
        backward, ctx.eps, 0.0, wanted, dy, rows, weight, rstd, dstream, mean
    )
    dw, db = dw_and_db(sums)
    return (
        dx.to(ctx.x_dtype) if needs_x and dx is not None else None,
        dx if needs_residual else None,
        dw.to(scale_dtype) if needs_dw and dw is not None else None,
        db.to(ctx.bias_dtype) if needs_db and db is not None else None,
    )


class LayerNormOperators(NormOperators):
    """The server of LayerNorm's operators for one package. Their forward is
    `layer_norm_forward`, with the kernels of `by_kernel`."""

    layer = "LayerNorm"
    aten = ("native_layer_norm", "native_layer_norm_backward")
    routes = LAYER_NORM_ROUTES
    fused = frozenset(("aten::native_layer_norm",))
    kinds = LAYER_NORM
    served: ClassVar[Served[LayerNormOperators]] = Served()
    layer_norm: ClassVar[Any]
    layer_norm_backward: ClassVar[Any]
    by_kernel: ByKernel = staticmethod(no_kernel)


# ---- Registered once, when this is imported ------------------------------------------------------

_served = LayerNormOperators.served


def _layer_norm(x: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
    operators = _served.known.get(others[-1])
    if operators is None and x.is_cuda:
        with suppress(RuntimeError):  # this process has no such package: PyTorch serves
            operators = _served(others[-1])
    by_kernel = no_kernel if operators is None else operators.by_kernel
    return layer_norm_forward(x, *others, by_kernel=by_kernel)


def _fake_layer_norm(x: Any, residual: Any, *_: Any) -> tuple[torch.Tensor, ...]:
    stream = x.new_empty(0) if residual is None else residual.new_empty(x.shape)
    return x.new_empty(x.shape), statistic_like(x), statistic_like(x), stream


def _define(name: str, run: Implementation, fake: Implementation) -> Any:
    return define(name, LAYER_NORM_SCHEMAS[name], run, fake)


LayerNormOperators.layer_norm = _define("layer_norm", _layer_norm, _fake_layer_norm)
decompose(LayerNormOperators.layer_norm, layer_norm_forward)
_backward = implementation_of_backward(_served)
LayerNormOperators.layer_norm_backward = LayerNormOperators.backward_operator = _define(
    "layer_norm_backward", _backward, fake_backward
)
LayerNormOperators.all = (LayerNormOperators.layer_norm, LayerNormOperators.layer_norm_backward)
differentiate(
    LayerNormOperators.layer_norm_backward,
    autograd_of_backward(LayerNormOperators.layer_norm_backward, _backward),
)
differentiate(
    LayerNormOperators.layer_norm,
    autograd_of(
        LayerNormOperators.layer_norm,
        _layer_norm,
        layer_norm_node(
            lambda *given: below_autograd(LayerNormOperators.layer_norm, given),
            lambda package: _served(package).backward,
        ),
        layer_norm_forward,
    ),
)
