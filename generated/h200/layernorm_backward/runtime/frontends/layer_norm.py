"""LayerNorm: the functions of an emitted package for its backward.

The forward is PyTorch's. What no kernel serves goes to PyTorch's backward or to the formula.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.compiler import is_dynamo_compiling

from ..launch.launch import enqueue, plain_extent
from ..launch.loaded_kernel import LoadedKernel
from ..launch.row_layout import dense, power_of_two
from ..serve.checks import DTYPES, check_arguments
from ..serve.describe import DescribedServer
from ..serve.layout import read_layout
from ..serve.options import Arguments, Options
from ..serve.server import _alignment
from ..spec import plan_launch
from ..table import MAX_ALIGNMENT
from ..torch_internals import (
    is_capturing,
    is_plain,
    modes_active,
    raw_stream,
    tangents_active,
    transforms_active,
)

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""dx, dgamma and dbeta."""


class LayerNormPackage(DescribedServer):
    """One emitted package of LayerNorm's backward. Safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        # A class of its own, which a package gives the name by which pickle finds it.
        members = {"_package": self, "__doc__": LayerNorm.__doc__}
        self.LayerNorm: type[LayerNorm] = type("LayerNorm", (LayerNorm,), members)

    def layer_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        """torch.nn.functional.layer_norm over the last dimension, whose backward is
        `layer_norm_backward`. x: (..., N); weight, bias: (N,) of x's dtype or fp32. The result has
        x's dtype.

        Tracers (torch.compile among them), modes and transforms of PyTorch get PyTorch's own.
        """
        watched = is_dynamo_compiling() or modes_active() or transforms_active()
        watched = watched or tangents_active()
        if watched or not all(map(is_plain, (x, weight, bias))):
            return _forward(x, weight, bias, eps)[0]
        return _Node.apply(self, x, weight, bias, eps)

    def layer_norm_backward(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        mean: torch.Tensor,
        rstd: torch.Tensor,
        weight: torch.Tensor | None = None,
        *,
        need_dx: bool = True,
        need_dw: bool = True,
    ) -> Gradients:
        """dx, dw and db of y = (x - mean) * rstd * weight + bias, where mean and rstd = 1 /
        sqrt(var(x) + eps) are of each row.

        dy, x: (..., N) of one dtype (bf16, fp16, fp32), in any layout; what no kernel can read in
        place is copied. mean, rstd: fp32, one value per row, as the forward saved them. weight:
        (N,) of x's dtype or fp32; None for ones, and then there is no dw and no db either.

        dx: contiguous, of x's shape and dtype; None with need_dx=False. dw, db: (N,) of the
        weight's dtype, two rows of one tensor; None with need_dw=False. No gradient flows through
        them. CPU tensors are served by the formula in PyTorch; what has no kernel here by PyTorch's
        kernel where it can, else by the formula, with one warning per reason. Everything runs on
        the current stream, may be captured into a CUDA graph and never waits.

        Raises TypeError or ValueError for arguments that do not fit, LaunchError when the driver
        refuses a launch.
        """
        with torch.no_grad():
            _check(dy, x, mean, rstd, weight)
            wants_dw = need_dw and weight is not None
            if x.device.type != "cuda" or x.numel() == 0:
                return _formula(dy, x, mean, rstd, weight, need_dx, wants_dw)
            found = self._find_kernel(Arguments(dy, x, rstd, weight), x.device.index)
            if isinstance(found, str):
                return self._without_kernel(found, dy, x, mean, rstd, weight, need_dx, wants_dw)
            with torch.cuda.device(x.device):
                return self._launch(found, dy, x, mean, rstd, weight, need_dx, wants_dw)

    def _find_kernel(self, given: Arguments, device: int) -> LoadedKernel | str:
        """What serves a call on a CUDA device, else why nothing does."""
        x, weight = given.x, given.weight
        if x.dtype not in DTYPES:
            return f"there is no kernel for {x.dtype}"
        layout, places = read_layout(given)
        names = (DTYPES[x.dtype], DTYPES[x.dtype if weight is None else weight.dtype])
        choice = self._choose(
            *(device, layout.rows, layout.columns, *names),
            alignment=power_of_two(places, MAX_ALIGNMENT),
            weight_alignment=_alignment(None if layout.copy[3] else weight),
        )
        return choice.reason if choice.kernel is None else self._kernels.get(choice.kernel)

    def _launch(
        self,
        kernel: LoadedKernel,
        dy: torch.Tensor,
        x: torch.Tensor,
        mean: torch.Tensor,
        rstd: torch.Tensor,
        weight: torch.Tensor | None,
        need_dx: bool,
        wants_dw: bool,
    ) -> Gradients:
        layout, _ = read_layout(Arguments(dy, x, rstd, weight))
        copy_dy, copy_x, _, _, _ = layout.copy
        dy, x = dense(dy) if copy_dy else dy, dense(x) if copy_x else x
        mean, rstd = mean.contiguous(), rstd.contiguous()
        weight = None if weight is None else weight.contiguous()
        dx = x.new_empty(x.shape) if need_dx else None
        dw = weight.new_empty((2, *weight.shape)) if wants_dw and weight is not None else None
        launch = plan_launch(kernel.spec, layout.rows)
        extent = plain_extent(
            launch,
            rows=layout.rows,
            columns=layout.columns,
            x_stride=layout.x.stride,
            dy_stride=layout.dy.stride,
            packed=(layout.x.inner, layout.x.outer, layout.dy.outer),
        )
        device = x.get_device()
        stream = raw_stream(device)
        tensors = (x, dy, rstd, weight, dx, dw, None, None)
        addresses = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
        call = (kernel, launch, extent, device, stream)
        if is_capturing():  # as in serve/call.py: nothing that a replay could share
            zeros = self._workspaces.of_capture(device, stream, launch.scratch_offset)
            scratch = x.new_empty(launch.scratch, dtype=torch.float32).data_ptr()
            enqueue(*call, zeros, scratch, addresses, mean.data_ptr())
        else:
            workspace = self._workspaces.of_stream(device, stream)
            with workspace.lock:  # up to the last kernel of the call
                workspace.fit(launch)
                enqueue(*call, workspace.zeros, workspace.scratch, addresses, mean.data_ptr())
        return (dx, None, None) if dw is None else (dx, dw[0], dw[1])

    def _without_kernel(
        self,
        reason: str,
        dy: torch.Tensor,
        x: torch.Tensor,
        mean: torch.Tensor,
        rstd: torch.Tensor,
        weight: torch.Tensor | None,
        need_dx: bool,
        wants_dw: bool,
    ) -> Gradients:
        if weight is not None and weight.dtype != x.dtype:
            self.warn(f"{reason}, and no fused one in PyTorch; using the formula in plain PyTorch")
            return _formula(dy, x, mean, rstd, weight, need_dx, wants_dw)
        self.warn(f"{reason}; using PyTorch's own kernel")
        rows = (*x.shape[:-1], 1)
        wanted = [need_dx, wants_dw, wants_dw]
        found = torch.ops.aten.native_layer_norm_backward(
            *(dy, x, x.shape[-1:], mean.reshape(rows), rstd.reshape(rows), weight, weight, wanted)
        )
        dx, dw, db = (grad if want else None for grad, want in zip(found, wanted, strict=True))
        return dx, dw, db


class _Node(torch.autograd.Function):
    """The node of `layer_norm`."""

    @staticmethod
    def forward(
        ctx: Any,
        package: LayerNormPackage,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        y, mean, rstd = _forward(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.package, ctx.bias_dtype = package, None if bias is None else bias.dtype
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        _, need_dx, need_dw, need_db, _ = ctx.needs_input_grad
        if weight is None and need_db:
            weight = x.new_ones(x.shape[-1], dtype=ctx.bias_dtype)
        dx, dw, db = ctx.package.layer_norm_backward(
            dy, x, mean, rstd, weight, need_dx=need_dx, need_dw=need_dw or need_db
        )
        db = db.to(ctx.bias_dtype) if need_db else None
        return None, dx, dw if need_dw else None, db, None


class LayerNorm(torch.nn.LayerNorm):
    """torch.nn.LayerNorm, with its arguments and its state dict, whose backward is this package's.
    The result has x's dtype."""

    _package: ClassVar[LayerNormPackage]
    """Every package has a subclass of this class."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dims = len(self.normalized_shape)
        weight = None if self.weight is None else self.weight.flatten()
        bias = None if self.bias is None else self.bias.flatten()
        return self._package.layer_norm(x.flatten(-dims), weight, bias, self.eps).view(x.shape)


def _forward(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y of x's dtype, and mean and rstd of every row in fp32 (in float64 for float64)."""
    given = [p for p in (weight, bias) if p is not None]
    if x.is_cuda and all(p.dtype == x.dtype for p in given):
        y, mean, rstd = torch.ops.aten.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
        return y, mean, rstd
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    wide = [None if p is None else p.to(compute) for p in (weight, bias)]
    y, mean, rstd = torch.ops.aten.native_layer_norm(x.to(compute), x.shape[-1:], *wide, eps)
    return y.to(x.dtype), mean, rstd


def _check(
    dy: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
) -> None:
    """Raise TypeError or ValueError, with one sentence, for arguments that do not fit together."""
    for name, tensor in (("dy", dy), ("x", x), ("mean", mean), ("rstd", rstd), ("weight", weight)):
        if not isinstance(tensor, torch.Tensor) and not (tensor is None and name == "weight"):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    check_arguments(Arguments(dy, x, rstd, weight), Options())
    if (mean.dtype, mean.device, mean.numel()) != (rstd.dtype, rstd.device, rstd.numel()):
        raise ValueError(
            f"mean must be like rstd ({rstd.numel()} of {rstd.dtype} on {rstd.device}), "
            f"got {mean.numel()} of {mean.dtype} on {mean.device}"
        )
    if weight is not None and weight.dim() != 1:
        raise ValueError(f"weight must have shape ({x.shape[-1]},), got {tuple(weight.shape)}")


def _formula(
    dy: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    need_dx: bool,
    wants_dw: bool,
) -> Gradients:
    """In plain PyTorch: in fp32 (in float64 for float64), rounded once at the end."""
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = (*x.shape[:-1], 1)
    scale, grad = rstd.to(compute).reshape(rows), dy.to(compute)
    normalized = (x.to(compute) - mean.to(compute).reshape(rows)) * scale
    dx = dw = db = None
    if need_dx:
        weighted = grad if weight is None else grad * weight.to(compute)
        along = normalized * (weighted * normalized).mean(-1, keepdim=True)
        dx = scale * (weighted - weighted.mean(-1, keepdim=True) - along)
        dx = dx.to(x.dtype).contiguous()
    if wants_dw and weight is not None:
        N = x.shape[-1]
        dw = (grad * normalized).reshape(-1, N).sum(0).to(weight.dtype)
        db = grad.reshape(-1, N).sum(0).to(weight.dtype)
    return dx, dw, db
