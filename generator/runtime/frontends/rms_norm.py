"""`rms_norm`: RMSNorm with autograd, as a function and as a module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch.compiler import is_dynamo_compiling

from ..serve.forward import Forward
from ..serve.server import Server
from ..torch_internals import is_plain, modes_active, tangents_active, tracing, transforms_active
from .differentiable import differentiable_norm
from .dtensor import register_sharding
from .gradients import NormArguments, gradients, gradients_of_sum
from .operators import Operators

Gradients = tuple["torch.Tensor | None", "torch.Tensor | None"]


class Norm:
    """The `rms_norm` of one package, and the gradients of its nodes.

    Where nobody watches operators, the nodes run the package's forward and backward themselves,
    without the dispatcher, which is the cheapest way to train eagerly. Everything else goes through
    `operators`.
    """

    def __init__(self, server: Server, forward: Forward, operators: Operators) -> None:
        self.forward, self.operators = forward, operators
        self._quick, self._run, self._native = server._quick, server._run, server._native

    def rms_norm(
        self,
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
        mode, CUDA graphs and with DTensor; forward-mode differentiation and torch.func get
        PyTorch's own operators. Raises TypeError or ValueError for arguments that do not fit.
        """
        weight_offset = float(weight_offset)
        if weight is not None and weight.dtype != x.dtype and weight.dtype != torch.float32:
            weight = weight.to(x.dtype)
        if (
            is_dynamo_compiling()
            or modes_active()
            or transforms_active()
            or tangents_active()
            or not (is_plain(x) and is_plain(weight) and is_plain(residual))
        ):
            return self._watched(x, weight, eps, weight_offset, residual)
        if not torch.is_grad_enabled():
            y, _, *stream = self.forward(x, weight, eps, weight_offset, residual)
            return (y, *stream) if stream else y
        if residual is not None:
            return EagerAddNorm.apply(self, x, residual, weight, eps, weight_offset)
        native = self._native.norm
        if native is None or tracing() is not None:  # a trace sees Python's node only
            return EagerNorm.apply(self, x, weight, eps, weight_offset)
        return native(x, weight, eps, weight_offset)

    def _watched(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float | None,
        weight_offset: float,
        residual: torch.Tensor | None,
    ) -> Any:
        """`rms_norm` where a tracer, a mode, a transform or a subclass sees the operators."""
        if not is_dynamo_compiling():
            if transforms_active():
                y, _, *stream = differentiable_norm(x, weight, eps, weight_offset, residual)
                return (y, *stream) if stream else y
            register_sharding(self.operators)
        if residual is None:
            return self.operators.rms_norm(x, weight, eps, weight_offset)[0]
        y, _, stream = self.operators.add_rms_norm(x, residual, weight, eps, weight_offset)
        return y, stream

    def gradients(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        rstd: torch.Tensor,
        eps: float | None,
        weight_offset: float,
        need_dx: bool,
        need_dw: bool,
    ) -> Gradients:
        """dx and dw of a node, the one in Python or that in C++."""
        # Dynamo first: it cannot trace the question whether a mode is active. A gradient may be
        # a subclass though x was none, such as a collective's result that has not arrived.
        watched = (
            is_dynamo_compiling()
            or torch.is_grad_enabled()
            or modes_active()
            or tangents_active()
            or not is_plain(dy)
        )
        if need_dx and need_dw and weight is not None and not watched and not weight_offset:
            results = self._quick(dy, x, rstd, weight)
            if results is not None:
                return results  # type: ignore[return-value]
        norm, wanted = NormArguments(eps, weight_offset), (need_dx, need_dw)
        run = self.operators.backward if watched else self._run
        return gradients(run, norm, wanted, dy, x, weight, rstd)

    def gradients_of_sum(
        self, ctx: Any, dy: torch.Tensor | None, dstream: torch.Tensor | None
    ) -> tuple[Any, ...]:
        """Gradients of x, residual and weight of a node of x + residual."""
        watched = (
            is_dynamo_compiling() or modes_active() or not (is_plain(dy) and is_plain(dstream))
        )
        run = self.operators.backward if watched else self._run
        return gradients_of_sum(run, ctx, ctx.needs_input_grad[1:4], dy, dstream)


class EagerNorm(torch.autograd.Function):
    """The node of `rms_norm` without a residual."""

    @staticmethod
    def forward(
        ctx: Any,
        norm: Norm,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float | None,
        weight_offset: float,
    ) -> torch.Tensor:
        y, rstd = norm.forward(x, weight, eps, weight_offset)
        ctx.save_for_backward(x, weight, rstd)
        ctx.norm, ctx.eps, ctx.weight_offset = norm, eps, weight_offset
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, weight, rstd = ctx.saved_tensors
        _, need_dx, need_dw, _, _ = ctx.needs_input_grad
        dx, dw = ctx.norm.gradients(
            dy, x, weight, rstd, ctx.eps, ctx.weight_offset, need_dx, need_dw
        )
        return None, dx, dw, None, None


class EagerAddNorm(torch.autograd.Function):
    """The node of `rms_norm` with a residual."""

    @staticmethod
    def forward(
        ctx: Any,
        norm: Norm,
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
        return y, stream

    @staticmethod
    def backward(
        ctx: Any, dy: torch.Tensor | None, dstream: torch.Tensor | None
    ) -> tuple[Any, ...]:
        dx, dresidual, dw = ctx.norm.gradients_of_sum(ctx, dy, dstream)
        return None, dx, dresidual, dw, None, None


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm, with its arguments and its state dict, run by this package.

    weight_offset: a number added to the weight in fp32, for models that store w - 1; the weight
    starts at 1 - weight_offset. The result has x's dtype.
    """

    _package_norm: ClassVar[Norm]
    """Of the package: every one has a subclass of this class."""
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
        register_sharding(self._package_norm.operators)
        self.weight_offset = float(weight_offset)
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)

    def reset_parameters(self) -> None:
        if self.elementwise_affine:
            torch.nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """y; with a residual (y, x + residual), see `rms_norm`."""
        dims = len(self.normalized_shape)
        offset = self.weight_offset
        if dims == 1:
            return self._package_norm.rms_norm(
                x, self.weight, self.eps, weight_offset=offset, residual=residual
            )
        weight = None if self.weight is None else self.weight.flatten()
        rows, other = x.flatten(-dims), None if residual is None else residual.flatten(-dims)
        results = self._package_norm.rms_norm(
            rows, weight, self.eps, weight_offset=offset, residual=other
        )
        if residual is None:
            return results.view(x.shape)
        return tuple(result.view(x.shape) for result in results)

    def extra_repr(self) -> str:
        offset = f", weight_offset={self.weight_offset}" if self.weight_offset else ""
        return super().extra_repr() + offset
