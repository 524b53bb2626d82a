"""One call: the checks of its arguments, and what runs for all calls of the same signature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .launch import Extent, LoadedKernel, current_stream
from .plan import Launch
from .workspace import Workspaces

Gradients = tuple[torch.Tensor, torch.Tensor]
Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Gradients]

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_arguments(
    dy: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor
) -> None:
    """Raise TypeError or ValueError, with one sentence, for arguments that do not fit together."""
    if x.dtype not in FLOATS:
        raise TypeError(f"x must be bfloat16, float16, float32 or float64, got {x.dtype}")
    if dy.dtype != x.dtype:
        raise TypeError(f"dy must have x's dtype {x.dtype}, got {dy.dtype}")
    if weight.dtype not in (x.dtype, torch.float32):
        raise TypeError(f"weight must have x's dtype {x.dtype} or float32, got {weight.dtype}")
    if rstd.dtype not in (torch.float32, x.dtype if x.dtype == torch.float64 else torch.float32):
        raise TypeError(f"rstd must be float32 as the forward saves it, got {rstd.dtype}")
    for name, tensor in (("dy", dy), ("rstd", rstd), ("weight", weight)):
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device} and x on {x.device}")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x must be (..., N) with N >= 1, got shape {tuple(x.shape)}")
    if dy.shape != x.shape:
        raise ValueError(f"dy must have x's shape {tuple(x.shape)}, got {tuple(dy.shape)}")
    N = x.shape[-1]
    if weight.shape != (N,):
        raise ValueError(f"weight must have shape ({N},), got {tuple(weight.shape)}")
    if rstd.numel() * N != x.numel():
        raise ValueError(
            f"rstd must have one value for each of the {x.numel() // N} rows of x, "
            f"got {rstd.numel()}"
        )


def row_stride(tensor: torch.Tensor) -> int | None:
    """Elements from one row to the next when the tensor is seen as (M, N) rows that are contiguous
    in themselves; None when that takes a copy. 0 for one row repeated by `expand`."""
    N = tensor.shape[-1]
    try:
        rows = tensor.view(-1, N)
    except RuntimeError:
        return None
    if N > 1 and rows.stride(1) != 1:
        return None
    return rows.stride(0) if rows.shape[0] > 1 else N


def power_of_two(number: int, most: int) -> int:
    """The largest power of two that divides `number`, up to `most` (itself a power of two)."""
    return (number | most) & -(number | most)


def no_rows(
    dy: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor
) -> Gradients:
    """The gradients of M = 0 rows: an empty dx and a dw of zeros."""
    return torch.empty_like(x), torch.zeros_like(weight)


def aten_backward(
    dy: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor
) -> Gradients:
    """PyTorch's own fused kernel, for what this package has none for."""
    with torch.no_grad():
        dx, dw = torch.ops.aten._fused_rms_norm_backward(
            dy, x, [x.shape[-1]], rstd.reshape(*x.shape[:-1], 1), weight, [True, True]
        )
    return dx, dw


@dataclass(frozen=True)
class KernelCall:
    """Launches one kernel for every call of one signature.

    copies: which of dy, x, rstd and weight have to be made contiguous first; empty for none.
    """

    kernel: LoadedKernel
    launch: Launch
    extent: Extent
    device: int
    copies: tuple[bool, ...]
    workspaces: Workspaces

    def __call__(
        self, dy: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor
    ) -> Gradients:
        device, launch = self.device, self.launch
        if torch.cuda.current_device() != device:
            with torch.cuda.device(device):
                return self(dy, x, rstd, weight)
        if self.copies:
            dy, x, rstd, weight = (
                tensor.detach().contiguous() if copy else tensor
                for tensor, copy in zip((dy, x, rstd, weight), self.copies, strict=True)
            )
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        dw = torch.empty_like(weight)
        stream = current_stream(device)
        pointers = (
            x.data_ptr(),
            dy.data_ptr(),
            rstd.data_ptr(),
            weight.data_ptr(),
            dx.data_ptr(),
            dw.data_ptr(),
        )
        # This also makes the device's context current in a thread that has not used it yet.
        if torch.cuda.is_current_stream_capturing():
            zeros = self.workspaces.zeros(device).take(launch.scratch_offset)
            scratch = torch.empty(launch.scratch, dtype=torch.float32, device=x.device)
            self.kernel.enqueue(
                device, stream, launch, self.extent, *pointers, zeros, scratch.data_ptr()
            )
            return dx, dw
        workspace = self.workspaces.of_stream(device, stream)
        with workspace.lock:
            workspace.fit(launch)
            self.kernel.enqueue(
                device, stream, launch, self.extent, *pointers, workspace.zeros, workspace.scratch
            )
        return dx, dw
