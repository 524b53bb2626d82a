"""The launches of one signature on one stream, with everything but the tensors written already.

A call that goes through here packs the addresses of its tensors and launches. What else a launch
needs (configuration, functions, extents, workspace) was put into one block of arguments before; the
block belongs to the signature and the stream, and the stream's lock guards it.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any, NamedTuple

from ..spec import SUM_KERNEL, Launch
from .driver import LaunchError, cuda_driver
from .launch import MAIN_ARGUMENTS, SUM_ARGUMENTS, Extent
from .loaded_kernel import LoadedKernel
from .workspace import StreamWorkspace

pack_addresses = struct.Struct("@8Q").pack_into
"""Writes x, dy, rstd, weight, dx, dw, dresidual and dresidual_out (0 for None), which the main
kernel's arguments begin with."""
pack_mean = struct.Struct("@Q").pack_into
"""Writes mean at MEAN."""
MEAN = MAIN_ARGUMENTS.size - 8
_SUM = MAIN_ARGUMENTS.size
_DW = 5 * 8  # which both kernels read from one place
MAIN_AT, SUM_AT = (0,), (_SUM, _DW, *range(_SUM + 16, _SUM + 32, 4))
SCRATCH_AT = (10 * 8, _SUM)
"""Where the parameters of either kernel begin in an argument block, and where the address of the
scratch stands. In bytes."""


class Binding(NamedTuple):
    """What the launches of one signature on one stream are made of.

    workspace, lock: where launches share them, else None. scratch: the workspace's address that
    `values` has; when the workspace has another one now, the binding is stale. launch: the driver's
    cuLaunchKernelEx. second: None where one kernel does it. main_arguments, sum_arguments:
    addresses of the arrays of parameter addresses; keep: the spec, and what owns these.
    """

    workspace: Any
    lock: Any
    scratch: int
    values: Any
    launch: Any
    main_config: Any
    main: Any
    main_arguments: int
    sum_config: Any
    second: Any
    sum_arguments: int
    keep: tuple[Any, ...]

    def run(self, addresses: tuple[int, ...], mean: int) -> None:
        """Launch with the given addresses, in the order of `pack_addresses`. Hold the lock. Raises
        LaunchError."""
        pack_addresses(self.values, 0, *addresses)
        pack_mean(self.values, MEAN, mean)
        (status,) = self.launch(self.main_config, self.main, self.main_arguments, 0)
        refused = ""
        if status == 0:
            if self.second is None:
                return
            refused = SUM_KERNEL
            (status,) = self.launch(self.sum_config, self.second, self.sum_arguments, 0)
            if status == 0:
                return
        spec = self.keep[0]
        raise LaunchError(status.name, "launching", f"{refused or spec.operation} of {spec.name}")


def argument_block(launch: Launch, extent: Extent, zeros: int, scratch: int) -> Any:
    """The arguments of both kernels in one piece of memory, with 0 for the addresses of all
    tensors, which come first."""
    values = ctypes.create_string_buffer(_SUM + SUM_ARGUMENTS.size)
    MAIN_ARGUMENTS.pack_into(
        values, 0, *([0] * 8), zeros, zeros + launch.zeroed_offset, scratch, *extent, 0
    )
    SUM_ARGUMENTS.pack_into(
        values,
        _SUM,
        *(scratch, 0, launch.partials, extent.columns, extent.dw_mode, extent.group),
    )
    return values


def bind(
    kernel: LoadedKernel,
    launch: Launch,
    extent: Extent,
    device: int,
    stream: int,
    zeros: int,
    scratch: int,
    wants_dw: bool,
    workspace: StreamWorkspace | None = None,
) -> Binding:
    """The binding of a launch to a raw stream of the current device, whose index is `device`.
    zeros: address of launch.scratch_offset zero bytes; scratch: of 4 * launch.scratch bytes of any
    content; workspace: whose these are, if it is shared: hold its lock. Without dw there is no
    second kernel. Raises LaunchError."""
    main, second = kernel.load(device)
    second = second if wants_dw else None
    values = argument_block(launch, extent, zeros, scratch)
    base = ctypes.addressof(values)
    main_array, sum_array = (
        (ctypes.c_void_p * len(offsets))(*(base + at for at in offsets))
        for offsets in (MAIN_AT, SUM_AT)
    )
    return Binding(
        workspace=workspace,
        lock=None if workspace is None else workspace.lock,
        scratch=scratch,
        values=values,
        launch=cuda_driver().cuLaunchKernelEx,
        main_config=kernel.main_config(launch.grid, stream),
        main=main,
        main_arguments=ctypes.addressof(main_array),
        sum_config=kernel.sum_config(launch.sum_grid, stream) if second is not None else None,
        second=second,
        sum_arguments=ctypes.addressof(sum_array),
        keep=(kernel.spec, main_array, sum_array),
    )
