"""RMSNorm that is quantized to FP8, and so its backward: the functions of a package of it, or of
those of all GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..operations import BACKWARD_FORMATS, FORMATS, QUANTIZED, STREAM_FORMATS
from ..serve.checks import FLOATS
from ..serve.kernels import Source
from ..torch_internals import float_of, served_dtype
from .differentiable import differentiable_backward
from .gradients import gradients
from .library import Served
from .quantized_backward import BackwardCall, quantized_backward, results_of
from .quantized_backward import Results as BackwardResults
from .quantized_node import SERVED, Call, Gradients, Results, numbers_of, quantized_norm
from .row_functions import OneOperation, RowFunctions

_FP32_EPS = torch.finfo(torch.float32).eps


class QuantizedFunctions(RowFunctions):
    """The functions of RMSNorm that is quantized to FP8. Safe to use from several threads."""

    served: ClassVar[Served[Any]] = SERVED
    packages = "quantized_packages"

    def __init__(
        self,
        sources: Callable[[str], Source | str],
        name: str,
        norm: Callable[[], Any] = lambda: None,
    ) -> None:
        """sources, name: as of RowFunctions. norm: finds the `Norm` whose backward serves; None for
        PyTorch's operators."""
        super().__init__(sources, name)
        self._norm = norm

    def explain(
        self,
        M: int,
        N: int,
        dtype: str | torch.dtype,
        weight_dtype: str | torch.dtype = "",
        *,
        offset: bool = False,
        format: str = "fp8_1x128",
        backward: bool = False,
        residual: str = "",
    ) -> dict[str, Any]:
        """Say which kernel serves M aligned rows of N columns ("bf16", "fp16" or "fp32"), and
        why. backward: of `rms_norm_backward_quantized`. residual: the dtype of its dresidual, or of
        the forward's residual, which is that of the rows."""
        _check_format(format)
        if not residual or backward:
            server = self.server((BACKWARD_FORMATS if backward else FORMATS)[format])
            return server.explain(M, N, dtype, weight_dtype, offset=offset, residual=residual)
        if format not in STREAM_FORMATS:
            raise ValueError(f"no kernel adds a residual in {format}: leave residual out")
        server = self.server(STREAM_FORMATS[format])
        return server.explain(M, N, dtype, weight_dtype, offset=offset)

    def rms_norm_quantized(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        eps: float | None = None,
        *,
        format: str = "fp8_1x128",
        residual: torch.Tensor | None = None,
        keep_y: bool = False,
        via: torch.dtype | None = None,
        power_of_two_scales: bool = False,
        weight_offset: float = 0.0,
    ) -> tuple[torch.Tensor, ...]:
        """Compute y = x * rstd * (weight + weight_offset) with rstd = 1 / sqrt(mean(x^2) + eps) of
        each row, quantized to FP8 in the same kernel.

        The kernel serves where one was tuned, else the formula in PyTorch, with the same rounding.
        Under torch.compile it is an operator. Works under autocast (which changes nothing here) and
        in CUDA graphs. torch.func and tensor subclasses use PyTorch's operators.

        With a residual, x is first added to it, and what is normalized is the sum h = x + residual
        as it is rounded to x's dtype.

        Gradients flow through y and h alone, and so through y only with keep_y. What multiplies y8
        and the scales shall take y, too, and return the gradient of the dequantized rows as that of
        y (straight-through). From there on, the backward is that of RMSNorm.

        Args:
            x: (..., N), bf16, fp16 or fp32. N is a multiple of 128, or of 32 for MX.
            weight: (N,), or None for ones. Its gradient has its dtype.
            eps: added to the mean square; None for the machine epsilon of fp32, as in `rms_norm`.
            format: "fp8_1x128": each block of 128 columns has the scale amax / 448 in fp32, as in
                DeepSeek-V3. "mxfp8_1x32": each block of 32 columns has the scale
                2^(floor(log2(amax)) - 8) in e8m0, as the OCP MX specification has it, and numbers
                beyond 448 are 448.
            residual: the residual stream, in x's shape and dtype. In "fp8_1x128" a kernel adds it
                where one was tuned, else PyTorch does.
            keep_y: also return y, in x's dtype.
            via: x's dtype, to round y to it before it is quantized, as a recipe does that quantizes
                what a norm returns. By default y is quantized as it is in fp32.
            power_of_two_scales: round the scales of "fp8_1x128" up to powers of two.
            weight_offset: a number added to the weight in fp32.

        Returns:
            (y8, scales, rstd), then y with keep_y, then h with a residual. y8 is float8_e4m3fn in
                x's shape: y divided by the scale of its block, rounded to nearest even. The scales
                are of shape (..., N / 128) in fp32, or (..., N / 32) in float8_e8m0fnu. All are
                contiguous. rstd is fp32 of shape (..., 1), as `rmsnorm_backward` takes it.

        Raises:
            TypeError, ValueError: if the arguments do not fit together.
        """
        eps = float_of(eps)
        _check(x, weight, format, via, power_of_two_scales)
        _check_residual(x, residual)
        numbers = (_FP32_EPS if eps is None else eps, float(weight_offset))
        call = Call(*numbers, format, keep_y, via is not None, power_of_two_scales)
        found = quantized_norm(x, served_dtype(weight, x), call, self.name, residual)
        return found if keep_y else (*found[:3], *found[4:])

    def rms_norm_backward_quantized(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        rstd: torch.Tensor,
        weight: torch.Tensor | None = None,
        *,
        format: str = "fp8_1x128",
        dresidual: torch.Tensor | None = None,
        via: torch.dtype | None = None,
        power_of_two_scales: bool = False,
        weight_offset: float = 0.0,
    ) -> tuple[torch.Tensor | None, ...]:
        """Compute the backward of y = x * rstd * (weight + weight_offset), and dx in FP8 in the
        same kernel: dx = rstd * (w * dy - xhat * mean(xhat * w * dy)), plus dresidual where given,
        and dw = the sum over rows of dy * xhat, with xhat = x * rstd.

        It is meant for autograd functions of the layer that made x, or the residual stream with it:
        that layer multiplies by dx8, while dx goes on as it is. The kernel serves where one was
        tuned, else the formula in PyTorch, with the same rounding. The same inputs give the same
        bits. Under torch.compile it is an operator. No gradient flows through the results.

        Args:
            dy: (..., N), the gradient of y. bf16, fp16 or fp32. N is a multiple of 128, or of 32
                for MX.
            x: in dy's shape and dtype.
            rstd: fp32, one number for each row, as a forward returns it.
            weight: (N,), or None for ones.
            format: that of dx8, as of `rms_norm_quantized`.
            dresidual: in dy's shape, the gradient that reaches x by another way, of any floating
                dtype. It is part of what is quantized.
            via: x's dtype, to round dx to it before it is quantized, as a recipe does that
                quantizes gradients. By default dx is quantized as it is in fp32.
            power_of_two_scales: round the scales of "fp8_1x128" up to powers of two.
            weight_offset: a number added to the weight in fp32.

        Returns:
            (dx, dx8, scales, dw), and with dresidual also dx in its dtype, as `rmsnorm_backward`
                returns it. dx is in x's dtype, dx8 is float8_e4m3fn in x's shape, with scales as of
                `rms_norm_quantized`. dw has the weight's dtype; None without a weight.

        Raises:
            TypeError, ValueError: if the arguments do not fit together.
        """
        _check(x, weight, format, via, power_of_two_scales)
        if x.is_nested:
            raise ValueError("x is a nested tensor: give the backward its values, which are rows")
        rows = {"dy": dy, "x": x, "rstd": rstd}
        given = rows | {"weight": served_dtype(weight, x), "dresidual": dresidual}
        call = BackwardCall(float(weight_offset), format, via is not None, power_of_two_scales)
        dx, dx8, scales, dw, wide = quantized_backward(given, call, self.name)
        found = (dx, dx8, scales, None if weight is None else dw.to(weight.dtype))
        if dresidual is None:
            return found
        return (*found, dx if dresidual.dtype == x.dtype else wide)

    def backward_quantized(self, given: Mapping[str, Any], call: BackwardCall) -> BackwardResults:
        """Return the results of `quantized_backward`, of tensors that fit together."""
        server = self.server(BACKWARD_FORMATS[call.form])
        return results_of(server(call.tensors(given), call.offset), given)

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        call: Call,
        residual: torch.Tensor | None = None,
    ) -> Results:
        """Return y8, its scales, rstd, y where it is kept, and the sum with a residual, without
        gradients."""
        if residual is not None:
            return self._forward_of_sum(x, weight, call, residual)
        return self._forward(x, weight, call)

    def _forward(self, x: torch.Tensor, weight: torch.Tensor | None, call: Call) -> Results:
        y = x.new_empty(x.shape if call.keep_y else 0)
        operation = FORMATS[call.form]
        tensors = {"x": x, "weight": weight, **numbers_of(operation, call)}
        into = {"y": y} if call.keep_y else {}
        found = self.server(operation)(tensors, call.offset, into)
        return found["y8"], found["y_scales"], found["rstd"], y

    def _forward_of_sum(
        self, x: torch.Tensor, weight: torch.Tensor | None, call: Call, residual: torch.Tensor
    ) -> Results:
        operation = STREAM_FORMATS.get(call.form)
        if operation is not None:
            server = self.server(operation)
            numbers = numbers_of(operation, call)
            tensors = {"x": x, "r": residual, "weight": weight, **numbers}
            server.count_call(x, tensors, call.offset)
            if server.may_serve(x):
                y = x.new_empty(x.shape if call.keep_y else 0)
                into = {"y": y} if call.keep_y else {}
                found = server.by_kernel(tensors, call.offset, into)
                if not isinstance(found, str):
                    return found["y8"], found["y_scales"], found["rstd"], y, found["h"]
        total = (x + residual).contiguous()
        return *self._forward(total, weight, call), total

    def backward(self, *given: Any) -> Gradients:
        """Return dx and dw of RMSNorm, of dy, x, weight, rstd, eps, the weight's offset, whether
        each is wanted, and the gradient that reaches x by another way."""
        dy, x, weight, rstd, eps, offset, need_dx, need_dw, *more = given
        wanted, dresidual = (need_dx, need_dw), more[0] if more else None
        norm = self._norm()
        with torch.no_grad():
            if norm is None:
                return differentiable_backward(dy, x, weight, eps, offset, dresidual, *wanted)
            of_node = (dy, x, weight, rstd, dresidual)
            return gradients(norm.run, eps, offset, wanted, *of_node, seen=False)


def _check_format(format: Any) -> None:
    if format not in FORMATS:
        raise ValueError(f"format is one of {', '.join(FORMATS)}, got {format!r}")


def _check(x: Any, weight: Any, format: Any, via: Any, powers: bool) -> None:
    """Raises TypeError or ValueError, in one sentence, for arguments that do not fit together."""
    for name, given in (("x", x), ("weight", weight)):
        if not isinstance(given, torch.Tensor) and not (given is None and name == "weight"):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(given).__name__}")
    _check_format(format)
    scales = FORMATS[format].signature.scales
    assert scales is not None
    if x.dtype not in FLOATS or x.dim() == 0 or x.shape[-1] == 0 or x.shape[-1] % scales.block:
        raise ValueError(
            f"x must be floating rows of a multiple of {scales.block} columns, as so many share a "
            f"scale in {format}, got {x.dtype} of shape {tuple(x.shape)}"
        )
    if weight is not None and (weight.dim() != 1 or weight.shape[0] != x.shape[-1]):
        raise ValueError(f"weight must have shape ({x.shape[-1]},), got {tuple(weight.shape)}")
    if weight is not None and weight.device != x.device:
        raise ValueError(f"weight is on {weight.device} and x on {x.device}")
    if via not in (None, x.dtype):
        raise ValueError(f"via is x's dtype {x.dtype}, or None to round once, got {via}")
    if powers and scales.kind != "fp32":
        raise ValueError(f"the scales of {format} are powers of two: leave power_of_two_scales out")


def _check_residual(x: torch.Tensor, residual: Any) -> None:
    if residual is None:
        return
    if not isinstance(residual, torch.Tensor):
        raise TypeError(f"residual must be a torch.Tensor, got {type(residual).__name__}")
    alike = residual.shape == x.shape and residual.dtype == x.dtype
    if not alike or residual.device != x.device:
        raise ValueError(
            f"residual must be like x, {x.dtype} of shape {tuple(x.shape)} on {x.device}, got "
            f"{residual.dtype} of shape {tuple(residual.shape)} on {residual.device}"
        )


class QuantizedPackage(QuantizedFunctions):
    """The functions of a package of RMSNorm that is quantized to one of the formats; others are
    PyTorch's operators in it, and so is the backward. Making one compiles nothing and does not
    touch CUDA."""

    def __init__(self, of: Path, name: str = "") -> None:
        """Raises ValueError for a damaged package and one of another operation, OSError for
        none."""
        self._kernels = OneOperation(of, QUANTIZED, "RMSNorm that is quantized to FP8")
        super().__init__(self._kernels.source_for(name or str(of)), name or str(of))

    @property
    def provenance(self) -> dict[str, Any]:
        """The target, and how the kernel of every tuned shape was found and checked."""
        return self._kernels.provenance
