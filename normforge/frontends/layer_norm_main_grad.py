"""Gradients of LayerNorm's weight and bias that go to their `main_grad`.

A kernel gives both as one tensor, in fp32, and PyTorch adds its rows to the buffers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..serve.options import Arguments, Options
from ..serve.reference import Results
from ..torch_internals import served_dtype, tracing, transforms_active, without_inference
from .dtensor import is_dtensor
from .gradients import is_watched
from .layer_norm_operators import layer_norm_gradients
from .layer_norm_routes import dw_and_db
from .main_grad import buffer_of, dummy_of, refused

_LAYER = "LayerNorm"
_NAMES = ("weight", "bias")


def main_grad_layer_norm(
    package: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    parameters: tuple[torch.nn.Parameter, torch.nn.Parameter | None],
    eps: float,
) -> Any:
    """`layer_norm` of a package, whose backward adds dw and db to the main_grad of the parameters.
    weight, bias: the parameters, or flat views of them. A gradient of dx raises RuntimeError."""
    wants = any(one is not None and one.requires_grad for one in (weight, bias))
    adds = torch.is_grad_enabled() and wants
    if not adds or not isinstance(x, torch.Tensor) or tracing() is not None:
        return package.layer_norm(x, weight, bias, eps, residual=residual)
    if not is_dynamo_compiling() and transforms_active():
        raise RuntimeError(refused(_LAYER))
    if any(map(is_dtensor, (x, residual, weight, bias))):
        raise TypeError(f"{_LAYER}(main_grad=True) takes no DTensor")
    apply: Any = _MainGradLayerNorm.apply
    if is_dynamo_compiling():  # as in main_grad.py
        apply = torch.compiler.disable(apply)
    try:
        found = apply(package, parameters, x, residual, weight, bias, eps)
    except RuntimeError as error:
        x, residual = without_inference(error, x, residual)
        found = apply(package, parameters, x, residual, weight, bias, eps)
    return found


class _MainGradLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        package: Any,
        parameters: tuple[torch.nn.Parameter, ...],
        *given: Any,
    ) -> Any:
        x, residual, weight, bias, ctx.eps = given
        # Cast here, where autograd sees nothing: its gradient of a cast would be of a dummy.
        weight, bias = served_dtype(weight, x), served_dtype(bias, x)
        call = (x, residual, weight, bias, ctx.eps, package.name)
        y, mean, rstd, stream = package._forward_for(call)(*call)
        ctx.save_for_backward(x if residual is None else stream, weight, rstd, mean)
        # The parameters themselves: what hooks give back for a saved tensor lacks its attributes.
        ctx.package, ctx.parameters, ctx.x_dtype = package, parameters, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        if residual is None:
            return y
        if not any(ctx.needs_input_grad[2:4]):
            ctx.mark_non_differentiable(stream)
        return y, stream

    @staticmethod
    def backward(
        ctx: Any, dy: torch.Tensor | None, dstream: torch.Tensor | None = None
    ) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(refused(_LAYER))
        needs, parameters = ctx.needs_input_grad[2:6], ctx.parameters
        run = ctx.package.ops.backward if is_watched(dy, dstream) else ctx.package._run
        added = False

        def into_main_grad(given: Arguments, options: Options) -> Results:
            nonlocal added
            if not options.need_dw:
                return run(given, options)
            # Before the kernel runs: nothing is added where a buffer does not fit.
            shape = given.x.shape[-1:]
            buffers = [
                _buffer_of(one, shape, name) if needed else None
                for one, name, needed in zip(parameters, _NAMES, needs[2:], strict=True)
            ]
            wide = None if given.x.dtype == torch.float64 else torch.float32
            dx, sums, *third = run(given, type(options)(**{**vars(options), "dw_dtype": wide}))
            for one, buffer, gradient in zip(parameters, buffers, dw_and_db(sums), strict=True):
                if buffer is None or gradient is None:
                    continue
                if getattr(one, "overwrite_main_grad", False):
                    buffer.copy_(gradient)
                else:
                    buffer.add_(gradient)
            added = True
            return (dx, None, *third)

        dx, dresidual, *found = layer_norm_gradients(
            into_main_grad, lambda *_: None, ctx, needs, dy, dstream
        )
        if any(one is not None for one in found):  # the formula has added nothing to the buffers
            raise RuntimeError(refused(_LAYER))
        dummies = (
            dummy_of(one) if added and needed else None
            for one, needed in zip(parameters, needs[2:], strict=True)
        )
        return None, None, dx, dresidual, *dummies, None


def _buffer_of(parameter: torch.nn.Parameter, shape: torch.Size, name: str) -> torch.Tensor:
    """The buffer of a parameter, of a dtype that gradients are added in. Raises RuntimeError or
    TypeError."""
    buffer = buffer_of(parameter, shape, name, _LAYER)
    if buffer.dtype not in (torch.float32, parameter.dtype):
        raise TypeError(
            f"{name}.main_grad must be of torch.float32 or of the {name}'s dtype, got "
            f"{buffer.dtype}"
        )
    return buffer
