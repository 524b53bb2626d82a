"""The autograd nodes of `rms_norm` in plain eager code. Each runs a package's forward and backward
directly: its first argument is the `Norm`."""

from __future__ import annotations

from typing import Any

import torch


class EagerNorm(torch.autograd.Function):
    """The node of `rms_norm` without a residual."""

    @staticmethod
    def forward(
        ctx: Any,
        norm: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float | None,
        weight_offset: float,
    ) -> torch.Tensor:
        y, rstd = norm.forward(x, weight, eps, weight_offset)
        ctx.save_for_backward(x, weight, rstd)
        ctx.norm, ctx.eps, ctx.weight_offset = norm, eps, weight_offset
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None) -> tuple[Any, ...]:
        if dy is None:
            return (None,) * 5
        x, weight, rstd = ctx.saved_tensors
        _, need_dx, need_dw, _, _ = ctx.needs_input_grad
        dx, dw = ctx.norm.gradients(
            dy, x, weight, rstd, ctx.eps, ctx.weight_offset, need_dx, need_dw
        )
        return None, dx, dw, None, None


class EagerNormAndAdd(torch.autograd.Function):
    """The node of `rms_norm` that is added to r."""

    @staticmethod
    def forward(
        ctx: Any,
        norm: Any,
        x: torch.Tensor,
        r: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float | None,
        weight_offset: float,
    ) -> torch.Tensor:
        y, rstd = norm.operators.norm_and_add(x, r, weight, eps, weight_offset)
        ctx.save_for_backward(x, weight, rstd)
        ctx.norm, ctx.eps, ctx.weight_offset = norm, eps, weight_offset
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None) -> tuple[Any, ...]:
        if dy is None:
            return (None,) * 6
        x, weight, rstd = ctx.saved_tensors
        _, need_dx, need_dr, need_dw, _, _ = ctx.needs_input_grad
        dx, dw = ctx.norm.gradients(
            dy, x, weight, rstd, ctx.eps, ctx.weight_offset, need_dx, need_dw
        )
        return None, dx, dy if need_dr else None, dw, None, None


class EagerAddNorm(torch.autograd.Function):
    """The node of `rms_norm` with a residual."""

    @staticmethod
    def forward(
        ctx: Any,
        norm: Any,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float | None,
        weight_offset: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, rstd, stream = norm.forward(x, weight, eps, weight_offset, residual)
        ctx.save_for_backward(stream, weight, rstd)
        ctx.norm, ctx.eps, ctx.weight_offset, ctx.x_dtype = norm, eps, weight_offset, x.dtype
        ctx.set_materialize_grads(False)
        if not any(ctx.needs_input_grad[1:3]):
            ctx.mark_non_differentiable(stream)
        return y, stream

    @staticmethod
    def backward(
        ctx: Any, dy: torch.Tensor | None, dstream: torch.Tensor | None
    ) -> tuple[Any, ...]:
        dx, dresidual, dw = ctx.norm.gradients_of_sum(ctx, dy, dstream)
        return None, dx, dresidual, dw, None, None


class EagerNormOfStream(torch.autograd.Function):
    """The node of a norm whose rows are kept, as a residual stream is: it returns them, too, so
    that what their other uses give for a gradient comes to the kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        norm: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float | None,
        weight_offset: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y = EagerNorm.forward(ctx, norm, x, weight, eps, weight_offset)
        return y, x  # autograd makes a view of it

    @staticmethod
    def backward(
        ctx: Any, dy: torch.Tensor | None, dstream: torch.Tensor | None
    ) -> tuple[Any, ...]:
        if dy is None and dstream is None:
            return (None,) * 5
        x, weight, rstd = ctx.saved_tensors
        need_dx, need_dw = ctx.needs_input_grad[1:3]
        dx, dw = ctx.norm.gradients(
            dy, x, weight, rstd, ctx.eps, ctx.weight_offset, need_dx, need_dw, dstream
        )
        return None, dx, dw, None, None
