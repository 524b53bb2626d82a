"""The launches of one signature on one stream, with everything but the tensors written already.

A call that goes through here packs the addresses of its tensors and launches. What else a launch
needs (configuration, functions, extents, workspace) was put into a block of arguments before, which
belongs to the signature and the stream, and which the stream's lock guards.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..operations import signature_of
from ..spec import SUM_KERNEL, KernelSpec, Launch
from .driver import LaunchError, cuda_driver
from .kernel_arguments import ArgumentLayout, Extent, argument_layout
from .loaded_kernel import LoadedKernel
from .workspace import StreamWorkspace


class Binding(NamedTuple):
    """The parts of the launches of one signature on one stream.

    workspace, lock: where launches share them, else None. scratch: the workspace's address that
    `values`, the block of arguments, has; when the workspace has another one now, the binding is
    stale. launch: the driver's cuLaunchKernelEx. second: None where one kernel does it.
    main_arguments, sum_arguments: addresses of `arrays`, which hold the addresses of parameters.
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
    spec: KernelSpec
    layout: ArgumentLayout
    arrays: tuple[Any, Any]

    def run(self, leading: Sequence[int], behind: Sequence[int] = ()) -> None:
        """Launch with the given addresses, as `layout` packs them. Hold the lock. Raises
        LaunchError."""
        self.layout.pack(self.values, leading, behind)
        (status,) = self.launch(self.main_config, self.main, self.main_arguments, 0)
        kernel = self.spec.operation
        if status == 0 and self.second is not None:
            (status,) = self.launch(self.sum_config, self.second, self.sum_arguments, 0)
            kernel = SUM_KERNEL
        if status != 0:
            raise LaunchError(status.name, "launching", f"{kernel} of {self.spec.name}")


def bind(
    kernel: LoadedKernel,
    launch: Launch,
    extent: Extent,
    device: int,
    stream: int,
    zeros: int,
    scratch: int,
    wants_sums: bool,
    workspace: StreamWorkspace | None = None,
) -> Binding:
    """The binding of a launch to a raw stream of the current device, whose index is `device`.
    zeros: address of launch.scratch_offset zero bytes; scratch: of 4 * launch.scratch bytes of any
    content; workspace: whose these are, if it is shared: hold its lock. Without sums over rows
    there is no second kernel. Raises LaunchError."""
    main, second = kernel.load(device)
    second = second if wants_sums else None
    layout = argument_layout(signature_of(kernel.spec.operation))
    values = layout.block(launch, extent, zeros, scratch)
    main_array, sum_array = (_addresses(values, offsets) for offsets in layout.parameters)
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
        spec=kernel.spec,
        layout=layout,
        arrays=(main_array, sum_array),
    )


def _addresses(block: Any, offsets: tuple[int, ...]) -> Any:
    base = ctypes.addressof(block)
    return (ctypes.c_void_p * len(offsets))(*(base + at for at in offsets))
