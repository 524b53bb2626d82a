"""`rms_norm`: RMSNorm with autograd, as a function and as a module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from ..native.native import Native
from ..serve.call_cache import Known
from ..serve.options import Arguments, Options
from ..serve.reference import Results
from ..torch_internals import is_plain, modes_active, tangents_active, tracing, transforms_active
from .differentiable import differentiable_norm
from .dtensor import register_sharding
from .operators import Operators

Norm = Callable[..., Any]
Gradients = tuple["torch.Tensor | None", "torch.Tensor | None"]


class NormArguments(NamedTuple):
    """What the gradients of a norm depend on beside tensors."""

    eps: float | None
    weight_offset: float


def make_gradients(
    operators: Operators,
    backward: Callable[[Arguments, Options], Results],
    known: Known,
    native: Native,
) -> Callable[..., Gradients]:
    """dx and dw of a node of `rms_norm`, for that in Python and that in C++.

    backward: as in `make_rms_norm`. known: calls of the backward; native: is told of those that it
    might serve.
    """

    def gradients(
        dy: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        rstd: torch.Tensor,
        eps: float | None,
        weight_offset: float,
        need_dx: bool,
        need_dw: bool,
    ) -> Gradients:
        # Dynamo first: it cannot trace the question whether a mode is active. A gradient may be
        # a subclass though x was none, such as a collective's result that has not arrived.
        watched = (
            is_dynamo_compiling()
            or torch.is_grad_enabled()
            or modes_active()
            or tangents_active()
            or not is_plain(dy)
        )
        if need_dx and need_dw and not watched and not weight_offset:
            for same, call in known.recent:
                if same(dy, x, rstd, weight):
                    results = call(dy, x, rstd, weight)
                    if results is not None:
                        if native.learn is not None:
                            native.learn(call)
                        return results
                    break
        norm, wanted = NormArguments(eps, weight_offset), (need_dx, need_dw)
        run = None if watched else backward
        return operators.gradients(norm, wanted, dy, x, weight, rstd, None, run)

    return gradients


def make_rms_norm(
    operators: Operators,
    forward: Callable[..., tuple[torch.Tensor, ...]],
    backward: Callable[[Arguments, Options], Results],
    gradients: Callable[..., Gradients],
    native: Native,
) -> Norm:
    """The `rms_norm` of a package.

    forward, backward: what its operators run, called without the dispatcher where nobody watches
    it, which is the cheapest way to train eagerly. gradients: by `make_gradients`. native: has a
    node that takes the place of the one here, once it is started.
    """

    class EagerNorm(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float
        ) -> torch.Tensor:
            y, rstd = forward(x, weight, eps, offset)
            ctx.save_for_backward(x, weight, rstd)
            ctx.eps, ctx.weight_offset = eps, offset
            return y

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
            x, weight, rstd = ctx.saved_tensors
            need_dx, need_dw, _, _ = ctx.needs_input_grad
            norm = (ctx.eps, ctx.weight_offset)
            return *gradients(dy, x, weight, rstd, *norm, need_dx, need_dw), None, None

    class EagerAddNorm(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any,
            x: torch.Tensor,
            residual: torch.Tensor,
            weight: torch.Tensor | None,
            eps: float,
            offset: float,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            y, rstd, stream = forward(x, weight, eps, offset, residual)
            ctx.save_for_backward(stream, weight, rstd)
            ctx.eps, ctx.weight_offset, ctx.x_dtype = eps, offset, x.dtype
            ctx.set_materialize_grads(False)
            return y, stream

        @staticmethod
        def backward(
            ctx: Any, dy: torch.Tensor | None, dstream: torch.Tensor | None
        ) -> tuple[Any, ...]:
            watched = (
                is_dynamo_compiling() or modes_active() or not (is_plain(dy) and is_plain(dstream))
            )
            return operators.gradients_of_sum(ctx, dy, dstream, None if watched else backward)

    def rms_norm(
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        eps: float | None = None,
        *,
        weight_offset: float = 0.0,
        residual: torch.Tensor | None = None,
    ) -> Any:
        """y = x * rstd * (weight + weight_offset) with rstd = 1 / sqrt(mean(x^2) + eps) of each
        row, differentiable in x, weight and residual.

        x: (..., N), bf16, fp16 or fp32. weight: (N,), (H, N) with x (..., H, N), or None for ones.
        Its gradient has its dtype. eps: None for the machine epsilon of fp32, as in
        torch.nn.functional.rms_norm. y: x's shape and dtype, computed in fp32 and rounded once.

        residual: of x's shape and any floating dtype. Then h = x + residual is what gets
        normalised, in the residual's dtype, and the result is (y, h): add the next layer's output
        to h. The gradient that comes back along h is added to that of the norm by the kernel.

        May be differentiated twice (create_graph=True), by PyTorch's own operators. Works under
        torch.compile, torch.utils.checkpoint, autocast (which changes nothing here), inference
        mode, CUDA graphs and with DTensor; torch.func gets PyTorch's own operators. Raises
        TypeError or ValueError for arguments that do not fit.
        """
        weight_offset = float(weight_offset)
        if weight is not None and weight.dtype != x.dtype and weight.dtype != torch.float32:
            weight = weight.to(x.dtype)
        if (
            is_dynamo_compiling()
            or modes_active()
            or transforms_active()
            or not (is_plain(x) and is_plain(weight) and is_plain(residual))
        ):
            return traced(x, weight, eps, weight_offset, residual)
        if not torch.is_grad_enabled():
            y, _, *stream = forward(x, weight, eps, weight_offset, residual)
            return (y, *stream) if stream else y
        if residual is None:
            if native.norm is None or tracing() is not None:  # a trace sees Python's node only
                return EagerNorm.apply(x, weight, eps, weight_offset)
            return native.norm(x, weight, eps, weight_offset)
        return EagerAddNorm.apply(x, residual, weight, eps, weight_offset)

    def traced(
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float | None,
        weight_offset: float,
        residual: torch.Tensor | None,
    ) -> Any:
        if not is_dynamo_compiling():
            if transforms_active():
                y, stream = differentiable_norm(x, weight, eps, weight_offset, residual)
                return y if residual is None else (y, stream)
            register_sharding(operators)
        if residual is None:
            return operators.rms_norm(x, weight, eps, weight_offset)[0]
        y, _, stream = operators.add_rms_norm(x, residual, weight, eps, weight_offset)
        return y, stream

    return rms_norm


def make_module(rms_norm: Norm, operators: Operators) -> type[torch.nn.RMSNorm]:
    """The `RMSNorm` of a package."""

    class RMSNorm(torch.nn.RMSNorm):
        """torch.nn.RMSNorm, with its arguments and its state dict, run by this package.

        weight_offset: a number added to the weight in fp32, for models that store w - 1; the weight
        starts at 1 - weight_offset. The result has x's dtype.
        """

        weight_offset: float = 0.0

        def __init__(
            self,
            normalized_shape: int | Sequence[int],
            eps: float | None = None,
            elementwise_affine: bool = True,
            device: Any = None,
            dtype: torch.dtype | None = None,
            *,
            weight_offset: float = 0.0,
        ) -> None:
            register_sharding(operators)
            self.weight_offset = float(weight_offset)
            super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)

        def reset_parameters(self) -> None:
            if self.elementwise_affine:
                torch.nn.init.constant_(self.weight, 1.0 - self.weight_offset)

        def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
            """y; with a residual (y, x + residual), see `rms_norm`."""
            dims = len(self.normalized_shape)
            if dims == 1:
                return rms_norm(
                    x, self.weight, self.eps, weight_offset=self.weight_offset, residual=residual
                )
            shape = x.shape
            weight = None if self.weight is None else self.weight.flatten()
            flat = x.flatten(-dims)
            if residual is None:
                return rms_norm(flat, weight, self.eps, weight_offset=self.weight_offset).view(
                    shape
                )
            results = rms_norm(
                *(flat, weight, self.eps),
                weight_offset=self.weight_offset,
                residual=residual.flatten(-dims),
            )
            return tuple(result.view(shape) for result in results)

        def extra_repr(self) -> str:
            offset = f", weight_offset={self.weight_offset}" if self.weight_offset else ""
            return super().extra_repr() + offset

    RMSNorm.__qualname__ = "RMSNorm"
    return RMSNorm


def per_head_forward(
    forward: Callable[..., tuple[torch.Tensor, ...]],
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """`forward` that also takes a weight per head, (H, N) with x (..., H, N): a call per head."""

    def any_forward(
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float | None,
        offset: float,
        residual: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        if weight is None or weight.dim() == 1:
            return forward(x, weight, eps, offset, residual)
        if weight.shape != x.shape[-2:]:
            raise ValueError(
                f"weight must have shape ({x.shape[-1]},) or {tuple(x.shape[-2:])}, "
                f"got {tuple(weight.shape)}"
            )
        if x.numel() == 0:
            rstd = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
            stream = () if residual is None else (torch.empty_like(residual),)
            return (torch.empty_like(x), rstd, *stream)
        heads = [
            forward(
                *(x[..., h, :], weight[h], eps, offset),
                None if residual is None else residual[..., h, :],
            )
            for h in range(len(weight))
        ]
        return tuple(torch.stack(parts, -2) for parts in zip(*heads, strict=True))

    return any_forward
