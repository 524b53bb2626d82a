"""LayerNorm: the functions of a package of its backward. The forward is PyTorch's where the package
beside it, of the forward, has no kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast, overload

import torch
from torch.compiler import is_dynamo_compiling

from ..serve.kernels import Source
from ..serve.options import Arguments, Options
from ..serve.reference import Results
from ..torch_internals import (
    PLAIN_TYPES,
    check_scale,
    float_of,
    is_plain,
    served_dtype,
    tracing,
    transforms_active,
    watched,
)
from .differentiable import is_foreign
from .dtensor import is_dtensor
from .layer_norm_forward import LayerNormKernels, layer_norm_forward
from .layer_norm_module import LayerNorm
from .layer_norm_operators import (
    LayerNormOperators,
    eager_layer_norm,
    forward_of_node,
    gradients_of_node,
    layer_norm_node,
)
from .layer_norm_routes import LAYER_NORM, dw_and_db, layer_norm_aten_call
from .package import NormPackage, Shape
from .patch import ALREADY, REMADE, ModuleForward, replace_forwards
from .tried import eps_of, is_layer_norm


class LayerNormPackage(NormPackage):
    """The functions of a package of LayerNorm's backward, or of those of several GPUs. Safe to use
    from several threads."""

    ops: LayerNormOperators
    operation = "layernorm_backward"
    _aten_call = staticmethod(layer_norm_aten_call)
    _has_aten = True
    _layer, _routed = "LayerNorm", LAYER_NORM

    def __init__(self, of: Path | Source, name: str = "") -> None:
        super().__init__(of, name)
        self.ops = LayerNormOperators(self.name, self._run, self._quick)
        folder = None if callable(of) else of
        self._kernels = self.ops.by_kernel = LayerNormKernels(folder, self._native)
        self._forward = partial(layer_norm_forward, by_kernel=self._kernels)
        self._node = layer_norm_node(self._forward, lambda _: self._serve, self._quick)
        self._eager = eager_layer_norm(self._kernels, self._serve, self._quick, self._native)
        # A class per package, under a name by which pickle finds it.
        members = {"_package": property(lambda _: self), "__doc__": LayerNorm.__doc__}
        self.LayerNorm: type[LayerNorm] = type("LayerNorm", (LayerNorm,), members)
        # One object each, so that all modules that it is patched into share one class.
        self._patched_forward = lambda module, input: self.layer_norm(
            input, module.weight, module.bias, module.eps
        )
        self._patched_other = lambda module, input: self.layer_norm(
            input, module.weight, getattr(module, "bias", None), cast(float, eps_of(module))
        )
        for name in ("_patched_forward", "_patched_other"):
            setattr(getattr(self, name), REMADE, partial(getattr, self, name))

    @overload
    def layer_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        eps: float = 1e-5,
        *,
        residual: None = None,
    ) -> torch.Tensor: ...

    @overload
    def layer_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        eps: float = 1e-5,
        *,
        residual: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def layer_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        eps: float = 1e-5,
        *others: Any,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute torch.nn.functional.layer_norm over the last dimension, with
        `layer_norm_backward` as its backward.

        Under torch.compile it is one operator. Second derivatives (create_graph=True) and batched
        gradients (is_grads_batched=True) use PyTorch's own operators. DTensor, nested tensors,
        torch.func, forward-mode differentiation and torch.jit.trace use PyTorch's own LayerNorm
        and its backward.

        Args:
            x: (..., N), bf16, fp16 or fp32.
            weight: (N,) in x's dtype or fp32, or None for ones.
            bias: like the weight, or None for zeros.
            eps: added to the variance. Below 2^-96 the backward is PyTorch's operations.
            residual: in x's shape and any floating dtype. The norm is then that of
                h = x + residual, which has the residual's dtype. The backward kernel adds the
                gradient of h to that of the norm.

        Returns:
            y in x's dtype, computed in fp32, or (y, h) with a residual.

        Raises:
            TypeError, ValueError: if the arguments do not fit together.
        """
        if type(eps) is not float or others:
            check_scale(weight)
            eps = _number(eps)
        if others:
            raise TypeError("layer_norm takes x, weight, bias and eps by position: name a residual")
        if (
            residual is None
            and type(x) in PLAIN_TYPES
            and (weight is None or type(weight) in PLAIN_TYPES)
            and (bias is None or type(bias) in PLAIN_TYPES)
            and not watched()
        ):
            y = self._eager(x, weight, bias, eps)
            if y is not None:
                return y
        if is_foreign(x):
            rows = x if residual is None else x + residual
            shape = (x.size(-1) if weight is None else weight.shape[-1],)
            y = torch.nn.functional.layer_norm(rows, shape, weight, bias, eps)
            return y if residual is None else (y, rows)
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
        weight, bias = served_dtype(weight, x), served_dtype(bias, x)
        given = (x, residual, weight, bias, eps, self.name)
        y, _, _, stream = self._forward_for(given)(*given)
        return y if residual is None else (y, stream)

    def _forward_for(self, given: tuple[Any, ...]) -> Callable[..., Any]:
        """Return the function that computes y, mean, rstd and the sum of these arguments."""
        plain = all(map(is_plain, given))
        if not plain and any(map(is_dtensor, given)):  # the operators have no rule for them
            return layer_norm_forward
        if is_dynamo_compiling():
            return self.ops.layer_norm
        if transforms_active() or tracing() is not None:
            return layer_norm_forward
        if watched() or not plain:
            return self.ops.layer_norm
        return self._node.apply if torch.is_grad_enabled() else self._forward

    def layer_norm_forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        eps: float = 1e-5,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute y = (x - mean) * rstd * weight + bias, and what `layer_norm_backward` takes.

        No gradient flows through the results. The arguments are those of `layer_norm`.

        Returns:
            (y, mean, rstd), with rstd = 1 / sqrt(var(x) + eps). y has x's shape and dtype. mean and
                rstd are fp32, one value per row.

        Raises:
            TypeError, ValueError: if the arguments do not fit together.
        """
        given = (x, None, served_dtype(weight, x), served_dtype(bias, x), _number(eps), self.name)
        with torch.no_grad():
            y, mean, rstd, _ = self._forward_for(given)(*given)
        return y, mean, rstd

    def layer_norm_backward(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        mean: torch.Tensor,
        rstd: torch.Tensor,
        weight: torch.Tensor | None = None,
        *,
        dresidual: torch.Tensor | None = None,
        need_dx: bool = True,
        need_dw: bool = True,
        dw_out: torch.Tensor | None = None,
        accumulate: bool = False,
        dw_dtype: torch.dtype | None = None,
    ) -> Results:
        """The gradients of y = (x - mean) * rstd * weight + bias, with the mean of each row and
        rstd = 1 / sqrt(var(x) + eps).

        The results are not differentiable: asking for a gradient through them raises RuntimeError.
        The call runs on the current stream, can be captured into a CUDA graph, and never
        synchronises with the host. Under torch.compile and other tracers it is one operator. CPU
        and meta tensors use the formula in PyTorch. If the package has no kernel for a call,
        PyTorch's kernel serves it where it can, else the formula, with one warning per reason.

        Args:
            dy: (..., N), bf16, fp16 or fp32, in any layout. Layouts that kernels cannot read in
                place are copied first.
            x: shape and dtype of dy, in any layout.
            mean: fp32, one value per row, as the forward saved it.
            rstd: like mean. From 2^64 on, a kernel's dx is not finite.
            weight: (N,) in x's dtype or fp32, or None for ones. Without a weight there is no dw and
                no db.
            dresidual: a gradient of x from elsewhere (the residual connection), in x's shape and
                any floating dtype. It is added to dx in fp32.
            need_dx: False to skip dx.
            need_dw: False to skip dw and db.
            dw_out: a tensor (2, N) for dw and db, in the weight's dtype or fp32. Its rows are
                returned as dw and db. It may overlap no other argument, which is not checked.
            accumulate: add dw and db to dw_out instead of overwriting it, in fp32 and in a fixed
                order.
            dw_dtype: torch.float32 to get dw and db without rounding them to the weight's dtype.

        Returns:
            (dx, dw, db), or (dx, dw, db, dresidual_out) with dresidual. dx is contiguous, in x's
                shape and dtype, or None. dw and db are (N,) in the weight's dtype, the rows of one
                tensor, or None. dresidual_out is dx in dresidual's dtype; it is dx itself if x has
                the same dtype.

        Raises:
            TypeError, ValueError: if the arguments do not fit together.
            LaunchError: if the driver refuses a launch.
        """
        if (
            mean is not None
            and weight is not None
            and dresidual is None
            and dw_out is None
            and dw_dtype is None
            and need_dx
            and need_dw
            and not accumulate
            and not watched()
        ):
            native, tensors = self._native.backward, (dy, x, rstd, weight, mean)
            results = (native and native(*tensors)) or self._quick(*tensors)
            if results is not None:
                dx, sums = results
                return dx, *dw_and_db(sums)
        if not isinstance(mean, torch.Tensor):
            raise TypeError(f"mean must be a torch.Tensor, got {type(mean).__name__}")
        given = Arguments(dy, x, rstd, weight, dresidual, dw_out, mean)
        options = Options(0.0, need_dx, need_dw, accumulate, dw_dtype)
        dx, sums, *third = self._serve(given, options)
        return (dx, *dw_and_db(sums), *third)

    def patch(self, model: torch.nn.Module) -> list[str]:
        """Serve the LayerNorms of a model: torch.nn.LayerNorm over one dimension, and classes
        derived from it or called ...Norm, as Hugging Face's Cohere has, if they compute the same on
        a few rows. Returns their names. `unpatch(model)` undoes it."""
        other = "it is not a LayerNorm over one dimension, or computes something else"

        def forward_for(module: Any) -> ModuleForward | str:
            if hasattr(type(module), "_package"):
                return ALREADY
            if not is_layer_norm(module):
                return other
            own = isinstance(module, torch.nn.LayerNorm)
            return self._patched_forward if own else self._patched_other

        return replace_forwards(model, self._layer, forward_for)

    def _start_native(self, *machine: Any) -> None:
        forward = forward_of_node(self._kernels)
        gradients = gradients_of_node(self._serve, self._quick)
        self._native.start(forward, gradients, self.ops, *machine)

    def _load_forwards(self, shapes: list[Shape], residual: str) -> None:
        # PyTorch adds a residual, and the sum has its dtype.
        rows = ((M, N, residual or dtype, of_weight) for M, N, dtype, of_weight in shapes)
        self._kernels.warmup(rows)


def _number(eps: Any) -> Any:
    """An eps as a number; raises TypeError for what is none, also for None."""
    found = float_of(eps)
    if found is None:
        raise TypeError("eps must be a number, got None")
    return found
