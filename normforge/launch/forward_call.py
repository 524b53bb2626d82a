"""The launches of a forward: the function that serves all calls of one signature.

A forward keeps nothing on the device between calls: no counters, no scratch. So calls on different
streams and captured ones share nothing but the block of arguments of their signature and stream,
which a lock guards until the driver has copied it.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..operations.tensor import columns, row_out, rows, rows_out
from ..torch_internals import (
    contiguous,
    current_device,
    empty_strided,
    is_capturing,
    raw_stream,
)
from .driver import LaunchError, cuda_driver
from .loaded_kernel import LoadedKernel
from .row_layout import RowLayout
from .workspace import MOST_STREAMS

ForwardCall = Callable[
    [torch.Tensor, "torch.Tensor | None", "float | None", float, "torch.Tensor | None"],
    "tuple[torch.Tensor, ...]",
]

# The kernel's one argument, a structure, as the compiler lays it out. What differs from call to
# call comes first: the addresses of TENSORS, eps and the weight's offset. Then ForwardExtent.
TENSORS = (
    *(rows("x"), rows("residual"), columns("weight")),
    *(rows_out("y"), row_out("rstd"), rows_out("residual_out")),
)
_ARGUMENTS = struct.Struct("@6Q2f4qiI")
pack_changing = struct.Struct("@6Q2f").pack_into
PLACES = {tensor.name: 8 * i for i, tensor in enumerate(TENSORS)} | {"eps": 48, "weight_offset": 52}
"""The offsets of what differs, in bytes."""
_EPS = torch.finfo(torch.float32).eps
"""The eps that PyTorch takes when none is given, for bf16 and fp16 rows as well."""


class ForwardExtent(NamedTuple):
    """The numbers of a signature in the order in which the kernel takes them.

    Strides are elements between rows; x_outer and x_inner: see RowLayout.
    """

    rows: int
    x_stride: int
    x_outer: int
    residual_stride: int
    columns: int
    x_inner: int


def pack_arguments(extent: ForwardExtent) -> bytes:
    """The kernel's argument without what differs from call to call."""
    return _ARGUMENTS.pack(*([0] * 6), 0.0, 0.0, *extent)


class ForwardFacts(NamedTuple):
    """The common facts of the calls of one signature, for who launches the same in another way.
    dtypes: of x and the weight."""

    kernel: LoadedKernel
    device: int
    with_residual: bool
    extent: ForwardExtent
    dtypes: tuple[torch.dtype, torch.dtype]


class Bindings(dict[int, tuple[Any, ...]]):
    """The bindings of one signature by stream, each made when it is first asked for: the arguments,
    guarded by a lock because the driver has copied them when a launch returns, and the launch
    configuration."""

    def __init__(
        self, kernel: LoadedKernel, device: int, with_residual: bool, extent: ForwardExtent
    ) -> None:
        self._kernel, self._device = kernel, device
        self._with_residual, self._extent = with_residual, extent

    def __missing__(self, stream: int) -> tuple[Any, ...]:
        function = self._kernel.load(self._device)[self._with_residual]
        values = ctypes.create_string_buffer(pack_arguments(self._extent), _ARGUMENTS.size)
        array = (ctypes.c_void_p * 1)(ctypes.addressof(values))
        config = self._kernel.main_config(self._kernel.spec.grid(self._extent.rows), stream)
        address = ctypes.addressof(array)
        binding = (threading.Lock(), values, config, function, address, array)  # keeps the array
        if len(self) >= MOST_STREAMS:
            self.clear()
        self[stream] = binding
        return binding


def forward_call(
    kernel: LoadedKernel,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None,
    x_layout: RowLayout | None,
    residual_layout: RowLayout | None,
) -> ForwardCall:
    """The function that serves every call of one signature with one kernel.

    x, weight, residual: of that signature, on a CUDA device, at least one row; only facts about
    them are kept. A layout of None asks for a copy. Where the kernel reads a weight and dense rows,
    the function has an attribute `facts`.
    """
    N, device, with_residual = x.shape[-1], x.get_device(), residual is not None
    rows, other = x_layout or RowLayout(N), residual_layout or RowLayout(N)
    extent = ForwardExtent(x.numel() // N, rows.stride, rows.outer, other.stride, N, rows.inner)
    bindings = Bindings(kernel, device, with_residual, extent)
    copy_x, copy_residual = x_layout is None, with_residual and residual_layout is None
    copy_weight = weight is not None and not weight.is_contiguous()
    size = contiguous(x.shape, x.dtype)
    rstd_size = contiguous((*x.shape[:-1], 1), torch.float32)
    launch_kernel = cuda_driver().cuLaunchKernelEx

    # Flat, because every attribute read and every inner call in here is paid at every step of a
    # training.
    def call(x: Any, weight: Any, eps: Any, weight_offset: float, residual: Any) -> tuple[Any, ...]:
        if current_device() != device:
            with torch.cuda.device(device):
                return call(x, weight, eps, weight_offset, residual)
        if copy_x:
            x = x.detach().contiguous()
        if copy_weight and weight is not None:
            weight = weight.detach().contiguous()
        y = empty_strided(*size)
        rstd = empty_strided(*rstd_size)
        stream = raw_stream(device)
        # Makes the device's context current in a thread that has not used it yet.
        is_capturing()
        lock, values, config, function, arguments, _ = bindings[stream]
        weight_at = 0 if weight is None else weight.data_ptr()
        epsilon = _EPS if eps is None else eps
        residual_at = out_at = 0
        results: tuple[torch.Tensor, ...] = (y, rstd)
        if residual is not None:
            if copy_residual:
                residual = residual.detach().contiguous()
            residual_out = empty_strided(*size)
            residual_at, out_at = residual.data_ptr(), residual_out.data_ptr()
            results = (y, rstd, residual_out)
        # fmt: off
        with lock:
            pack_changing(
                values, 0, x.data_ptr(), residual_at, weight_at, y.data_ptr(), rstd.data_ptr(),
                out_at, epsilon, weight_offset,
            )
            (status,) = launch_kernel(config, function, arguments, 0)
        # fmt: on
        if status == 0:
            return results
        raise LaunchError(status.name, "launching", kernel.spec.name)

    if weight is not None and rows == other == RowLayout(N):
        facts = ForwardFacts(kernel, device, with_residual, extent, (x.dtype, weight.dtype))
        call.facts = facts  # type: ignore[attr-defined]
    return call
