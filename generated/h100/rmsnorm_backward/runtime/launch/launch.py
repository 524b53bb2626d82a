"""The launches of a backward: its arguments as the kernels take them, and their way to the driver.

A launch packs its arguments into a block of memory, gives the driver the addresses of the
parameters, and the driver copies them before it returns. A block therefore serves one launch at a
time: here every thread has one of its own; those of binding.py are guarded by their stream's lock.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from typing import NamedTuple

import torch

from ..spec import SUM_KERNEL, Launch
from .driver import LaunchError, cuda_driver
from .loaded_kernel import LoadedKernel

# The arguments as the compiler lays them out, every one naturally aligned. The main kernel's are
# one structure: x, dy, rstd, weight, dx, dw, dresidual, dresidual_out; counters, zeroed, scratch;
# Extent; mean, where a kernel that takes none does not look.
MAIN_ARGUMENTS = struct.Struct("@8Q3Q7qI3ifQ")
MAIN_OFFSETS = (0,)
# scratch, dw; rows of partial dw, columns, dw mode, and how many rows are sums of whole groups,
# which only a batch-invariant kernel takes.
SUM_ARGUMENTS = struct.Struct("@2Q4i")
SUM_OFFSETS = (0, 8, 16, 20, 24, 28)

DW_IN_WEIGHT_DTYPE, DW_IN_FP32, DW_ADDED = 0, 1, 2
"""What a kernel does with dw: rounds it to the weight's dtype, stores it as fp32, or adds it to the
fp32 numbers that are there."""


class Extent(NamedTuple):
    """The numbers of a call in the order in which the kernel takes them.

    Strides are elements between rows. x_gap, dy_gap: elements of a gap behind some rows, as between
    the heads of one token and the next in a packed tensor; gaps: see `gap_factor`, 0 where all rows
    lie at one stride.
    """

    rows: int
    x_stride: int
    dy_stride: int
    dresidual_stride: int
    dx_stride: int
    x_gap: int
    dy_gap: int
    gaps: int
    columns: int
    group: int
    dw_mode: int
    weight_offset: float


def plain_extent(
    launch: Launch,
    rows: int,
    columns: int,
    x_stride: int,
    dy_stride: int,
    *,
    dresidual_stride: int = 0,
    dx_stride: int | None = None,
    packed: tuple[int, int, int] = (0, 0, 0),
    dw_mode: int = DW_IN_WEIGHT_DTYPE,
    weight_offset: float = 0.0,
) -> Extent:
    """The extent of a call. dx_stride: default `columns`; packed: heads, and elements from one
    token to the next in x and in dy; heads is 0 where all rows lie at one stride, and
    `gap_factor(rows, heads)` must not be 0 where it is not."""
    heads, x_outer, dy_outer = packed
    return Extent(
        rows=rows,
        x_stride=x_stride,
        dy_stride=dy_stride,
        dresidual_stride=dresidual_stride,
        dx_stride=columns if dx_stride is None else dx_stride,
        x_gap=x_outer - heads * x_stride,
        dy_gap=dy_outer - heads * dy_stride,
        gaps=gap_factor(rows, heads),
        columns=columns,
        group=launch.group,
        dw_mode=dw_mode,
        weight_offset=weight_offset,
    )


def gap_factor(rows: int, heads: int) -> int:
    """f for which f * row >> 32 is row // heads, for every row below `rows`; 0 where there is none,
    or no heads. (f * heads exceeds 2^32 by at most `heads`, so the product is off by less than
    rows * heads, which must stay below 2^32.)"""
    return (1 << 32) // heads + 1 if heads > 1 and rows * heads < 1 << 32 else 0


class _Arguments(threading.local):
    """One block of kernel arguments per thread; the driver copies it before a launch returns."""

    def __init__(self) -> None:
        self.values = ctypes.create_string_buffer(MAIN_ARGUMENTS.size + SUM_ARGUMENTS.size)
        base = ctypes.addressof(self.values)
        self._main = (ctypes.c_void_p * len(MAIN_OFFSETS))(*(base + at for at in MAIN_OFFSETS))
        base += MAIN_ARGUMENTS.size
        self._sum = (ctypes.c_void_p * len(SUM_OFFSETS))(*(base + at for at in SUM_OFFSETS))
        self.main = ctypes.addressof(self._main)
        self.sum = ctypes.addressof(self._sum)


_arguments = _Arguments()


def launch_backward(
    kernel: LoadedKernel,
    launch: Launch,
    stream: int,
    *,
    x: torch.Tensor,
    dy: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    dx: torch.Tensor | None,
    dw: torch.Tensor | None,
    workspace: int,
    dresidual: torch.Tensor | None = None,
    dresidual_out: torch.Tensor | None = None,
    dw_mode: int = DW_IN_WEIGHT_DTYPE,
    weight_offset: float = 0.0,
    mean: torch.Tensor | None = None,
) -> None:
    """Launch on `stream` (a raw CUDA stream), without waiting.

    x, dy, dx: (M, N) of the spec's dtype, the columns contiguous, M >= 1; base addresses and row
    strides multiples of spec.vector_bytes. x and dy may be (M / H, H, N) as well, with any two
    strides, where H > 1 and M * H < 2^32. rstd, mean: (M,) fp32, of which the kernel reads what its
    operation has. weight: (N,) contiguous; dw: the same, of every sum over rows; dw is fp32 unless
    dw_mode is DW_IN_WEIGHT_DTYPE. weight None stands for ones; dx or dw None is not
    computed. dresidual: (M, N) of spec.residual, if it has one; dresidual_out: the same, contiguous
    like dx, where that is not the spec's dtype. weight_offset: counts where spec.offset is set.
    workspace: address of launch.workspace_bytes bytes on the device, of which the first
    launch.scratch_offset are zero. launch: plan_launch(spec, M).

    Raises LaunchError. Nothing is checked here: the dispatch has done so.
    """
    packed = (x.shape[1], x.stride(0), dy.stride(0)) if x.dim() == 3 else (0, 0, 0)
    extent = plain_extent(
        launch,
        rows=x.numel() // x.shape[-1],
        columns=x.shape[-1],
        x_stride=x.stride(-2),
        dy_stride=dy.stride(-2),
        dresidual_stride=0 if dresidual is None else dresidual.stride(0),
        dx_stride=None if dx is None else dx.stride(0),
        packed=packed,
        dw_mode=dw_mode,
        weight_offset=weight_offset,
    )
    tensors = (x, dy, rstd, weight, dx, dw, dresidual, dresidual_out)
    enqueue(
        kernel,
        launch,
        extent,
        x.get_device(),
        stream,
        zeros=workspace,
        scratch=workspace + launch.scratch_offset,
        addresses=tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors),
        mean=0 if mean is None else mean.data_ptr(),
    )


def enqueue(
    kernel: LoadedKernel,
    launch: Launch,
    extent: Extent,
    device: int,
    stream: int,
    zeros: int,
    scratch: int,
    addresses: tuple[int, ...],
    mean: int = 0,
) -> None:
    """`launch_backward` for a caller that has the extent and the addresses already. addresses: of
    x, dy, rstd, weight, dx, dw, dresidual and dresidual_out, 0 for None. zeros: address of
    launch.scratch_offset zero bytes; scratch: of 4 * launch.scratch bytes of any content."""
    main, second = kernel.load(device)
    block, driver = _arguments, cuda_driver()
    zeroed = zeros + launch.zeroed_offset
    workspace = (zeros, zeroed, scratch)
    MAIN_ARGUMENTS.pack_into(block.values, 0, *addresses, *workspace, *extent, mean)
    config = kernel.main_config(launch.grid, stream)
    (status,) = driver.cuLaunchKernelEx(config, main, block.main, 0)
    if status != 0:
        raise LaunchError(
            status.name, "launching", f"{kernel.spec.operation} of {kernel.spec.name}"
        )
    dw = addresses[5]
    if second is None or dw == 0:  # nobody wants what the second kernel would write
        return
    numbers = (launch.partials, extent.columns, extent.dw_mode, extent.group)
    SUM_ARGUMENTS.pack_into(block.values, MAIN_ARGUMENTS.size, scratch, dw, *numbers)
    config = kernel.sum_config(launch.sum_grid, stream)
    (status,) = driver.cuLaunchKernelEx(config, second, block.sum, 0)
    if status != 0:
        raise LaunchError(status.name, "launching", f"{SUM_KERNEL} of {kernel.spec.name}")
