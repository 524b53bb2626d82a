"""Gradients of a weight that go to its `main_grad`, as Megatron's fused accumulation has it."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..serve.options import Arguments, Options, dw_elsewhere
from ..serve.reference import Results
from ..torch_internals import is_plain, tracing, transforms_active, without_inference
from .dtensor import is_dtensor
from .gradients import gradients_of_sum, is_watched
from .rms_norm import Norm


def refused(layer: str = "RMSNorm") -> str:
    """Return what a layer with main_grad says of derivatives that it does not have."""
    return (
        f"{layer}(main_grad=True) has no second derivative, no batched backward and no forward "
        "mode: run without create_graph=True, is_grads_batched=True, torch.func.vmap and dual "
        "tensors"
    )


def main_grad_norm(
    norm: Norm,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    parameter: torch.nn.Parameter,
    eps: float | None,
    weight_offset: float,
) -> Any:
    """`rms_norm` whose backward adds dw to parameter.main_grad. weight: the parameter, or a flat
    view of it. Once a gradient of dx is asked for, there is an error."""
    adds = torch.is_grad_enabled() and weight.requires_grad
    if not adds or not isinstance(x, torch.Tensor) or tracing() is not None:
        return norm.rms_norm(x, weight, eps, weight_offset=weight_offset, residual=residual)
    if not is_dynamo_compiling() and transforms_active():
        raise RuntimeError(refused())
    apply: Any = _MainGradNorm.apply
    if is_dynamo_compiling():
        # A graph would not see what happens to attributes of a parameter. Not a decorator: the
        # import of this module would import the compiler.
        apply = torch.compiler.disable(apply)
    try:
        return apply(norm, x, residual, weight, parameter, eps, weight_offset)
    except RuntimeError as error:
        x, residual = without_inference(error, x, residual)
    return apply(norm, x, residual, weight, parameter, eps, weight_offset)


class _MainGradNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        norm: Norm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        parameter: torch.nn.Parameter,
        eps: float | None,
        weight_offset: float,
    ) -> Any:
        y, rstd, *stream = norm.rmsnorm_forward(
            x, weight, eps, weight_offset=weight_offset, residual=residual
        )
        ctx.save_for_backward(stream[0] if stream else x, weight, rstd)
        # The parameter itself: what hooks give back for a saved tensor lacks its attributes.
        ctx.norm, ctx.parameter, ctx.x_dtype = norm, parameter, x.dtype
        ctx.eps, ctx.weight_offset = eps, weight_offset
        ctx.set_materialize_grads(False)
        if not any(ctx.needs_input_grad[1:3]):
            ctx.mark_non_differentiable(*stream)
        return (y, *stream) if stream else y

    @staticmethod
    def backward(
        ctx: Any, dy: torch.Tensor | None, dstream: torch.Tensor | None = None
    ) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(refused())
        _, needs_x, needs_residual, _, needs_dw, _, _ = ctx.needs_input_grad
        seen = is_watched(dy, dstream)
        run = ctx.norm.operators.backward if seen else ctx.norm.run
        added = False

        def into_main_grad(given: Arguments, options: Options) -> Results:
            nonlocal added
            results: Results
            if not options.need_dw or given.weight is None:
                results = run(given, options)
            else:
                add = not getattr(ctx.parameter, "overwrite_main_grad", False)
                buffer = buffer_of(ctx.parameter, given.weight.shape)
                # Wide rows may have made the weight wide, and then this is not its dtype any more.
                narrow = buffer.dtype == ctx.parameter.dtype != given.weight.dtype
                # This does what dataclasses.replace does, in 0.7 us less of every backward.
                given = Arguments(**{**vars(given), "dw_out": buffer})
                options = type(options)(**{**vars(options), "accumulate": add})
                try:
                    results = dw_elsewhere(run, given, options) if narrow else run(given, options)
                except TypeError as error:
                    raise TypeError(f"weight.main_grad as dw_out: {error}") from error
            added = True
            return results

        needs = (needs_x, needs_residual, needs_dw)
        dx, dresidual, dw = gradients_of_sum(into_main_grad, ctx, needs, dy, dstream, seen)
        if dw is not None and not added:  # the formula has added nothing to the buffer
            raise RuntimeError(refused())
        dummy = None if dw is None else dummy_of(ctx.parameter)
        return None, dx, dresidual, None, dummy, None, None


def buffer_of(
    parameter: torch.nn.Parameter,
    shape: torch.Size,
    name: str = "weight",
    layer: str = "RMSNorm",
) -> torch.Tensor:
    """The buffer of a parameter of a layer, in this shape. Trainers that shard parameters make it
    on request. name: the parameter's. Raises RuntimeError or TypeError for one that does not
    fit."""
    on_request = getattr(parameter, "get_main_grad", None)
    buffer = getattr(parameter, "main_grad", None) if on_request is None else on_request()
    if buffer is None:
        raise RuntimeError(
            f"{layer}(main_grad=True) adds its gradient to {name}.main_grad, and there is none: "
            "let the trainer make its buffers before the first backward"
        )
    alike = is_plain(buffer) and is_plain(parameter)
    if not alike and is_dtensor(buffer) != is_dtensor(parameter):
        wanted, got = "a DTensor" if is_dtensor(parameter) else "no DTensor", type(buffer).__name__
        raise TypeError(
            f"{name}.main_grad must be {wanted}, as the {name} is, got {got}: make it with "
            f"torch.zeros_like({name})"
        )
    try:
        return buffer.view(shape)
    except RuntimeError as error:
        raise RuntimeError(
            f"{name}.main_grad must be contiguous, with the {name}'s shape "
            f"{tuple(parameter.shape)}, got {tuple(buffer.shape)}"
        ) from error


def dummy_of(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """Return the tensor that autograd sees as the gradient that is in the buffer already. Trainers
    whose hooks start a communication want some tensor, and drop it."""
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    looked_at = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
    if getattr(parameter, "zero_out_wgrad", False) or looked_at:
        return torch.zeros_like(parameter)
    return torch.empty_like(parameter)
