"""Cubin to loaded kernel to launch, through the CUDA driver.

Everything that does not change from call to call is built once: the launch configuration (grid,
block, shared memory, attributes, stream) is a driver object that is never written to again and is
shared by all threads; the arguments live in one block per thread, whose addresses the driver
already has, so that a call packs its numbers and launches.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..spec import MAIN_KERNEL, SUM_KERNEL, KernelSpec, Launch
from .driver import LaunchError, checked, cluster_attribute, configure, cuda_driver, during_capture

PORTABLE_CLUSTER = 8
"""Largest cluster that every GPU with clusters takes without opting in (CUDA programming guide)."""

# The arguments as the compiler lays them out, every one naturally aligned. The main kernel's are
# one structure: x, dy, rstd, weight, dx, dw, dresidual, dresidual_out; counters, zeroed, scratch;
# Extent.
MAIN_ARGUMENTS = struct.Struct("@8Q3Q7qI3if")
MAIN_OFFSETS = (0,)
# scratch, dw; rows of partial dw, columns, dw mode.
SUM_ARGUMENTS = struct.Struct("@2Q3i")
SUM_OFFSETS = (0, 8, 16, 20, 24)

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
        *(rows, x_stride, dy_stride, dresidual_stride),
        columns if dx_stride is None else dx_stride,
        *(x_outer - heads * x_stride, dy_outer - heads * dy_stride, gap_factor(rows, heads)),
        columns,
        *(launch.group, dw_mode, weight_offset),
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


class LoadedKernel:
    """One variant, loaded on each device when it is first launched there.

    Safe to share between threads. A launch needs x's device to be the thread's current one and
    its context to exist, which is so after any PyTorch call that reached the device.
    """

    def __init__(
        self, cubin: bytes, spec: KernelSpec, warn: Callable[[str], None] | None = None
    ) -> None:
        """warn: is told when the device has no room for all clusters at once."""
        self.cubin = cubin
        self.spec = spec
        self._warn = warn
        self._lock = threading.Lock()
        self._functions: dict[int, tuple[Any, Any]] = {}
        self._main_configs: dict[tuple[int, int], Any] = {}
        self._sum_configs: dict[tuple[int, int], Any] = {}

    def __repr__(self) -> str:
        return f"LoadedKernel({self.spec.name}, devices={sorted(self._functions)})"

    def load(self, device: int) -> tuple[Any, Any]:
        """The functions of the main and the second kernel (None without one) on the current
        device, whose index is `device`. Loads the cubin at the first call.

        Raises LaunchError when the driver refuses the cubin or its shared memory or cluster.
        """
        with self._lock:
            fresh = device not in self._functions
            if fresh:
                with during_capture(self.spec.name):
                    self._functions[device] = self._load()
            functions = self._functions[device]
        if fresh and self._warn and self.spec.cluster > 1:
            self._warn_of_waves(functions[0], self._warn)
        return functions

    def _load(self) -> tuple[Any, Any]:
        driver, spec = cuda_driver(), self.spec
        action = "loading"
        module = checked(driver.cuModuleLoadData(self.cubin), action, spec.name)
        main = checked(driver.cuModuleGetFunction(module, MAIN_KERNEL.encode()), action, spec.name)
        second = None
        if spec.strategy == "separate":
            second = checked(
                driver.cuModuleGetFunction(module, SUM_KERNEL.encode()), action, spec.name
            )
        attributes = driver.CUfunction_attribute
        if spec.smem_bytes:
            size = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            action = f"allowing {spec.smem_bytes} bytes of shared memory for"
            checked(driver.cuFuncSetAttribute(main, size, spec.smem_bytes), action, spec.name)
        if spec.cluster > PORTABLE_CLUSTER:
            wide = attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            action = f"allowing clusters of {spec.cluster} for"
            checked(driver.cuFuncSetAttribute(main, wide, 1), action, spec.name)
        return main, second

    def _warn_of_waves(self, main: Any, warn: Callable[[str], None]) -> None:
        """GPUs of one model differ in how many SMs each of their GPCs has, and a cluster lives in
        one GPC."""
        spec = self.spec
        attributes = [cluster_attribute(spec.cluster)]
        config = configure(spec.cluster, spec.threads, spec.smem_bytes, 0, attributes)
        status, room = cuda_driver().cuOccupancyMaxActiveClusters(main, config)
        if status == 0 and room < spec.participants:
            warn(
                f"{spec.name} runs {spec.participants} clusters of {spec.cluster} CTAs, and this "
                f"GPU has room for {room} at once: right but slow here, tune for this very GPU"
            )

    def launch(
        self,
        x: torch.Tensor,
        dy: torch.Tensor,
        rstd: torch.Tensor,
        weight: torch.Tensor | None,
        dx: torch.Tensor | None,
        dw: torch.Tensor | None,
        workspace: int,
        launch: Launch,
        stream: int,
        *,
        dresidual: torch.Tensor | None = None,
        dresidual_out: torch.Tensor | None = None,
        dw_mode: int = DW_IN_WEIGHT_DTYPE,
        weight_offset: float = 0.0,
    ) -> None:
        """Launch on `stream` (a raw CUDA stream), without waiting.

        x, dy, dx: (M, N) of the spec's dtype, the columns contiguous, M >= 1; base addresses and
        row strides multiples of spec.vector_bytes. x and dy may be (M / H, H, N) as well, with any
        two strides, where H > 1 and M * H < 2^32. rstd: (M,) fp32; weight, dw: (N,) contiguous; dw
        is fp32 unless dw_mode is DW_IN_WEIGHT_DTYPE. weight None stands for ones; dx or dw None is
        not computed.
        dresidual: (M, N) of spec.residual, if it has one; dresidual_out: the same, contiguous like
        dx, where that is not the spec's dtype. weight_offset: counts where spec.offset is set.
        workspace: address of launch.workspace_bytes bytes on the device, of which the first
        launch.scratch_offset are zero. launch: plan_launch(spec, M).

        Raises LaunchError. Nothing is checked here: the dispatch has done so.
        """
        rows, columns = x.numel() // x.shape[-1], x.shape[-1]
        packed = (x.shape[1], x.stride(0), dy.stride(0)) if x.dim() == 3 else (0, 0, 0)

        def address(tensor: torch.Tensor | None) -> int:
            return 0 if tensor is None else tensor.data_ptr()

        self.enqueue(
            x.get_device(),
            stream,
            launch,
            plain_extent(
                *(launch, rows, columns, x.stride(-2), dy.stride(-2)),
                dresidual_stride=0 if dresidual is None else dresidual.stride(0),
                dx_stride=None if dx is None else dx.stride(0),
                packed=packed,
                dw_mode=dw_mode,
                weight_offset=weight_offset,
            ),
            *(address(x), address(dy), address(rstd), address(weight), address(dx), address(dw)),
            *(workspace, workspace + launch.scratch_offset),
            *(address(dresidual), address(dresidual_out)),
        )

    def enqueue(
        self,
        device: int,
        stream: int,
        launch: Launch,
        extent: Extent,
        x: int,
        dy: int,
        rstd: int,
        weight: int,
        dx: int,
        dw: int,
        zeros: int,
        scratch: int,
        dresidual: int = 0,
        dresidual_out: int = 0,
    ) -> None:
        """`launch` for a caller that has the addresses and the extent already; an address of 0 is
        None. zeros: address of launch.scratch_offset zero bytes; scratch: of 4 * launch.scratch
        bytes of any content."""
        main, second = self._functions.get(device) or self.load(device)
        config = self._main_configs.get((launch.grid, stream))
        if config is None:
            config = self.configure_main(launch.grid, stream)
        block = _arguments
        # fmt: off
        MAIN_ARGUMENTS.pack_into(
            block.values, 0, x, dy, rstd, weight, dx, dw, dresidual, dresidual_out,
            zeros, zeros + launch.zeroed_offset, scratch, *extent,
        )
        # fmt: on
        driver = cuda_driver()
        (status,) = driver.cuLaunchKernelEx(config, main, block.main, 0)
        if status != 0:
            raise LaunchError(status.name, "launching", f"{MAIN_KERNEL} of {self.spec.name}")
        if second is None or dw == 0:
            return
        config = self._sum_configs.get((launch.sum_grid, stream))
        if config is None:
            config = self.configure_sum(launch.sum_grid, stream)
        SUM_ARGUMENTS.pack_into(
            block.values,
            MAIN_ARGUMENTS.size,
            scratch,
            dw,
            launch.participants,
            extent.columns,
            extent.dw_mode,
        )
        (status,) = driver.cuLaunchKernelEx(config, second, block.sum, 0)
        if status != 0:
            raise LaunchError(status.name, "launching", f"{SUM_KERNEL} of {self.spec.name}")

    def configure_main(self, grid: int, stream: int) -> Any:
        """The launch configuration of the main kernel; made once, never written to again."""
        spec = self.spec
        attributes = [cluster_attribute(spec.cluster)] if spec.cluster > 1 else []
        config = configure(grid, spec.threads, spec.smem_bytes, stream, attributes)
        self._main_configs[grid, stream] = config
        return config

    def configure_sum(self, grid: int, stream: int) -> Any:
        """The same of the second kernel."""
        driver, spec = cuda_driver(), self.spec
        attributes = []
        if spec.dependent:
            early = driver.CUlaunchAttribute()
            kinds = driver.CUlaunchAttributeID
            early.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            early.value.programmaticStreamSerializationAllowed = 1
            attributes.append(early)
        config = configure(grid, spec.sum_threads, 0, stream, attributes)
        self._sum_configs[grid, stream] = config
        return config
