"""`rms_norm`: RMSNorm with autograd."""

from __future__ import annotations

from typing import Any, cast, overload

import torch
from torch.compiler import is_dynamo_compiling

from ..serve.checks import check_forward
from ..serve.forward import Forward
from ..serve.options import SMALLEST_EPS
from ..serve.reference import norm_formula
from ..serve.server import Server
from ..torch_internals import (
    PLAIN_TYPES,
    check_scale,
    float_of,
    is_plain,
    served_dtype,
    tracing,
    transforms_active,
    watched,
    without_inference,
)
from .differentiable import foreign_norm, is_foreign
from .dtensor import register_sharding
from .gradients import gradients, gradients_of_sum, is_watched
from .nodes import EagerAddNorm, EagerNorm
from .norm_add import NormAndAdd, check_add, forward_and_add, norm_and_add
from .operators import Operators
from .unfused import add_bias, widened, with_dtype

NO_INVARIANT_BIAS = (
    "batch-invariant norms have no bias: PyTorch sums its gradient over the rows, and the bits of "
    "that sum depend on the batch"
)


class Norm:
    """The `rms_norm` of one package, and the gradients of its autograd nodes.

    In plain eager code the nodes run the package's forward and backward directly, without PyTorch's
    dispatcher, which is the cheapest way to train eagerly. Everything else goes through
    `operators`.
    """

    added: NormAndAdd | None = None
    """Serves calls with `add`; None: the norm and PyTorch's addition do."""

    def __init__(self, server: Server, forward: Forward, operators: Operators) -> None:
        self.forward, self.operators = forward, operators
        self._quick, self.run, self._native = server._quick, server._run, server._native
        self._invariant, self._server = server._invariant, cast(Any, server)

    def __deepcopy__(self, _: Any) -> Norm:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a reference to the package."""
        return getattr, (self._server, "_norm")

    @overload
    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        eps: float | None = None,
        *,
        bias: torch.Tensor | None = None,
        weight_offset: float = 0.0,
        residual: None = None,
        add: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        residual_dtype: None = None,
    ) -> torch.Tensor: ...

    @overload
    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        eps: float | None = None,
        *,
        bias: torch.Tensor | None = None,
        weight_offset: float = 0.0,
        residual: torch.Tensor,
        out_dtype: torch.dtype | None = None,
        residual_dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        eps: float | None = None,
        *others: Any,
        bias: torch.Tensor | None = None,
        weight_offset: float = 0.0,
        residual: torch.Tensor | None = None,
        add: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        residual_dtype: torch.dtype | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute y = x * rstd * (weight + weight_offset) + bias with rstd = 1 / sqrt(mean(x^2) +
        eps) of each row, differentiable in x, weight, bias, residual and add.

        Works under torch.compile, torch.utils.checkpoint, autocast (which changes nothing here),
        inference mode and CUDA graphs, and with DTensor. Second derivatives (create_graph=True),
        batched gradients (is_grads_batched=True), forward-mode differentiation and torch.func use
        PyTorch's own operators.

        Args:
            x: (..., N), bf16, fp16 or fp32.
            weight: (N,), or (H, N) with x (..., H, N), or None for ones. Its gradient has its
                dtype.
            eps: added to the mean square; None for the machine epsilon of fp32, as in
                torch.nn.functional.rms_norm. Below 2^-96 the backward is PyTorch's operations.
            bias: a tensor of the weight's shape, or (N,). It is rounded to x's dtype, or to a wider
                out_dtype, and added to y by PyTorch, which also sums its gradient over the rows.
            weight_offset: a number added to the weight in fp32.
            residual: in x's shape and any floating dtype. The norm is then that of
                h = x + residual, which has the residual's dtype. The backward kernel adds the
                gradient of h to that of the norm.
            add: in x's shape and dtype. It is added to y in fp32, before y is rounded; its gradient
                is dy. Without a kernel for the call, y is rounded, and PyTorch adds.
            out_dtype: y's dtype, None for x's. PyTorch widens x before the norm, or rounds y after
                it.
            residual_dtype: h's dtype, None for the residual's, which it must be able to hold.

        Returns:
            y in x's shape and dtype (or out_dtype), computed in fp32 and rounded once (with a bias,
                before and after it is added), or (y, h) with a residual. Add the next layer's
                output to h.

        Raises:
            TypeError, ValueError: if the arguments do not fit together, or for a bias in a
                batch-invariant package.
        """
        if others:
            check_scale(weight)
            raise TypeError("rms_norm takes x, weight and eps by position: name all that follows")
        if add is not None:
            check_add(x, add, residual, out_dtype, residual_dtype)
            return norm_and_add(self, x, weight, eps, add, bias, weight_offset)
        if bias is not None or out_dtype is not None or residual_dtype is not None:
            x, residual = widened(x, residual, out_dtype, residual_dtype)
            results = self.rms_norm(x, weight, eps, weight_offset=weight_offset, residual=residual)
            if bias is not None:
                results = self.add_bias(results, bias, weight)
            return with_dtype(results, out_dtype)
        if (
            watched()
            or type(x) not in PLAIN_TYPES
            or (weight is not None and type(weight) not in PLAIN_TYPES)
            or (residual is not None and type(residual) not in PLAIN_TYPES)
        ):
            return self._watched(x, weight, eps, float(weight_offset), residual)
        weight_offset = float(weight_offset)
        if eps is not None and type(eps) is not float:
            eps = float_of(eps)
        if weight is not None and weight.dtype != x.dtype and weight.dtype != torch.float32:
            weight = served_dtype(weight, x)
        if not torch.is_grad_enabled() or not (
            x.requires_grad
            or (weight is not None and weight.requires_grad)
            or (residual is not None and residual.requires_grad)
        ):
            y, _, *stream = self.forward(x, weight, eps, weight_offset, residual)
            return (y, stream[0]) if stream else y
        try:
            if residual is not None:
                return EagerAddNorm.apply(self, x, residual, weight, eps, weight_offset)
            native = self._native.norm
            if native is None:
                return EagerNorm.apply(self, x, weight, eps, weight_offset)
            return native(x, weight, eps, weight_offset)
        except RuntimeError as error:
            x, weight, residual = without_inference(error, x, weight, residual)
        return self.rms_norm(x, weight, eps, weight_offset=weight_offset, residual=residual)

    def add_bias(self, results: Any, bias: torch.Tensor, weight: torch.Tensor | None) -> Any:
        """Return results of `rms_norm` with a bias added to y."""
        if self._invariant:
            raise ValueError(NO_INVARIANT_BIAS)
        return add_bias(results, bias, weight)

    def forwards(self) -> tuple[Forward, ...]:
        """The forwards that serve this norm, and others that were asked of it."""
        return (self.forward,)

    def matching(self, name: str) -> Norm:
        """The norm beside this one whose forward has the bits of another implementation. Raises
        ValueError."""
        raise ValueError(
            f"matches={name!r} needs batch-invariant kernels: take the norm from "
            "normforge.batch_invariant"
        )

    def _watched(self, x: Any, weight: Any, eps: Any, offset: float, residual: Any) -> Any:
        """Compute `rms_norm` when a tracer, a mode, a transform or a tensor subclass is active."""
        run: Any = self._operator
        check_scale(weight)
        eps = float_of(eps)
        if is_foreign(x):
            return foreign_norm(x, weight, eps, offset, residual)
        if not is_dynamo_compiling() and (transforms_active() or tracing() is not None):
            run, weight = norm_formula, served_dtype(weight, x)
            if tracing() is None:  # a tracer would keep the questions as constants
                check_forward(x, weight, residual)
        y, _, *stream = run(x, weight, eps, offset, residual)
        return (y, *stream) if stream else y

    def _operator(self, x: Any, weight: Any, eps: Any, offset: float, residual: Any) -> Any:
        """Return y, rstd and, with a residual, the sum, by an operator."""
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
        weight = served_dtype(weight, x)
        if not is_dynamo_compiling():
            register_sharding(*self.operators.all)
        package = self.operators.package
        if residual is None:
            return self.operators.rms_norm(x, weight, eps, offset, package)
        return self.operators.add_rms_norm(x, residual, weight, eps, offset, package)

    def rmsnorm_forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        eps: float | None = None,
        *,
        weight_offset: float = 0.0,
        residual: torch.Tensor | None = None,
        add: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Return (y, rstd) for `rmsnorm_backward`, or (y, rstd, h) with a residual.

        Arguments, y and h = x + residual are as in `rms_norm`. rstd is fp32 (float64 for float64
        rows), with shape x.shape[:-1] + (1,). It is not differentiable; y and h are. Raises
        TypeError or ValueError if the arguments do not fit together.
        """
        if add is not None:
            check_add(x, add, residual)
            return forward_and_add(self, x, weight, eps, add, weight_offset)
        tensors = (x, weight, residual)
        if (
            watched()
            or not all(map(is_plain, tensors))
            or (
                torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in tensors)
            )
        ):
            return self._operator(x, weight, float_of(eps), float(weight_offset), residual)
        weight = served_dtype(weight, x)
        return self.forward(x, weight, float_of(eps), float(weight_offset), residual)

    def gradients(
        self,
        dy: torch.Tensor | None,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        rstd: torch.Tensor,
        eps: float | None,
        weight_offset: float,
        need_dx: bool,
        need_dw: bool,
        dresidual: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return dx and dw of an autograd node, in Python or in C++. dy may be None with a
        dresidual."""
        seen = is_watched(dy, dresidual)
        usual = not weight_offset and (eps is None or eps >= SMALLEST_EPS) and dresidual is None
        if need_dx and need_dw and weight is not None and dy is not None and not seen and usual:
            results = self._quick(dy, x, rstd, weight)
            if results is not None:
                return results  # type: ignore[return-value]
        run = self.operators.backward if seen else self.run
        wanted = (need_dx, need_dw)
        given = (eps, weight_offset, wanted, dy, x, weight, rstd, dresidual)
        return gradients(run, *given, seen=seen)

    def gradients_of_sum(
        self, ctx: Any, dy: torch.Tensor | None, dstream: torch.Tensor | None
    ) -> tuple[Any, ...]:
        """Return the gradients of x, residual and weight of a node of x + residual."""
        seen = is_watched(dy, dstream)
        run = self.operators.backward if seen else self.run
        return gradients_of_sum(run, ctx, ctx.needs_input_grad[1:4], dy, dstream, seen)
