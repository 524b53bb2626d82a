"""The calls of one signature, and what serves them all: a kernel, PyTorch's own, or the formula.

A kernel call allocates what it returns, and launches in one of two ways:
- Eagerly, through the binding of its signature and stream. The lock of the stream's workspace spans
  both kernels, so that no other thread's launch comes between them, and the kernels of one stream
  run in order: each finds the counters at zero, as the one before left them.
- Into a graph that is being captured, with counters that belong to the capture and scratch from the
  graph's pool: a replay may run while eager calls do, and must not share either with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..launch.binding import Binding, bind
from ..launch.kernel_arguments import (
    DW_ADDED,
    DW_IN_FP32,
    DW_IN_WEIGHT_DTYPE,
    argument_layout,
    extent_of,
    pack_address,
)
from ..launch.loaded_kernel import LoadedKernel
from ..launch.row_layout import dense
from ..launch.workspace import MOST_STREAMS, PER_THREAD, Workspaces
from ..operations import signature_of
from ..spec import Launch
from ..table import MAX_ALIGNMENT
from ..torch_internals import (
    Size,
    contiguous,
    current_device,
    empty_strided,
    is_capturing,
    raw_stream,
)
from .layout import Layout
from .options import Arguments, Options, dw_shape
from .reference import Results, reference_backward

Call = Callable[..., Results]
"""Takes dy, x, rstd, weight and, when the signature has them, dresidual, dw_out, mean, dx_out."""

QuickCall = Callable[..., "Results | None"]
"""Takes dy, x, rstd, weight and, when the signature has it, mean; None: not served."""
_DONE = (0,)  # a driver call returned CUDA_SUCCESS


def formula(options: Options) -> Call:
    """The formula in PyTorch, for whatever has no kernel."""

    def call(*tensors: Any) -> Results:
        return reference_backward(**vars(Arguments(*tensors)), **vars(options))

    return call


def aten_call(options: Options) -> Call:
    """Return a call of PyTorch's own fused kernel, for what this package has none for. Serves no
    option but what is wanted."""

    def call(
        dy: torch.Tensor,
        x: torch.Tensor,
        rstd: torch.Tensor,
        weight: torch.Tensor | None,
        *_: Any,
    ) -> Results:
        wanted = [options.need_dx, options.need_dw and weight is not None]
        with torch.no_grad():
            dx, dw = torch.ops.aten._fused_rms_norm_backward(
                dy, x, [x.shape[-1]], rstd.reshape(*x.shape[:-1], 1), weight, wanted
            )
        return (dx if wanted[0] else None), (dw if wanted[1] else None)

    return call


class KernelCall:
    """Serves every call of one signature with one kernel.

    *_size: shape, strides and dtype of what a call allocates, None for nothing. third: the result
    with a dresidual, dx in its dtype. copy: what is made dense first, None for nothing. quick: the
    same in less time for most calls of a training, those with a weight that want dx and dw and need
    no copy; None for other signatures. It answers None where dy, x or the weight is not at a
    multiple of MAX_ALIGNMENT; its attribute `slow` is this object.
    """

    def __init__(
        self,
        kernel: LoadedKernel,
        launch: Launch,
        device: int,
        given: Arguments,
        options: Options,
        layout: Layout,
        workspaces: Workspaces,
    ) -> None:
        """given: arguments of the signature; only their shapes and dtypes are kept."""
        self.kernel, self.launch, self.device = kernel, launch, device
        self.workspaces = workspaces
        self.bindings: dict[int, Binding] = {}
        self.copy = layout.copy if any(layout.copy) else None
        x, weight, dresidual, dw_out = given.x, given.weight, given.dresidual, given.dw_out
        self.wants_dw = weight is not None and options.need_dw
        self.with_third = dresidual is not None
        own_dx = options.need_dx and given.dx_out is None
        self.dx_size = contiguous(x.shape, x.dtype) if own_dx else None
        self.third_size: Size | None = None
        if dresidual is not None and dresidual.dtype != x.dtype:
            self.third_size = contiguous(x.shape, dresidual.dtype)
        self.dw_size: Size | None = None
        dw_mode = DW_IN_WEIGHT_DTYPE
        if weight is not None and options.need_dw:
            dw_dtype = dw_out.dtype if dw_out is not None else options.dw_dtype or weight.dtype
            if options.accumulate:
                dw_mode = DW_ADDED
            elif dw_dtype != weight.dtype:
                dw_mode = DW_IN_FP32
            self.dw_size = contiguous(dw_shape(given), dw_dtype) if dw_out is None else None
        self.arguments = argument_layout(signature_of(kernel.spec.operation))
        plain_extent = extent_of(
            self.arguments.signature, layout.rows, layout.columns, layout.strided, launch.group
        )
        self.extent = plain_extent._replace(dw_mode=dw_mode, weight_offset=options.weight_offset)
        plain = self.dx_size and self.dw_size and not self.with_third and self.copy is None
        self.quick = _quick_call(self) if plain else None

    def __call__(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        rstd: torch.Tensor,
        weight: torch.Tensor | None,
        dresidual: torch.Tensor | None = None,
        dw_out: torch.Tensor | None = None,
        mean: torch.Tensor | None = None,
        dx_out: torch.Tensor | None = None,
    ) -> Results:
        if current_device() != self.device:
            with torch.cuda.device(self.device):
                return self(dy, x, rstd, weight, dresidual, dw_out, mean, dx_out)
        if self.copy is not None:
            copy = self.copy
            dy = dense(dy) if copy.dy else dy
            x = dense(x) if copy.x else x
            rstd = rstd.detach().contiguous() if copy.rstd else rstd
            if weight is not None and copy.weight:
                weight = weight.detach().contiguous()
            if dresidual is not None and copy.dresidual:
                dresidual = dense(dresidual)
            if mean is not None and copy.mean:
                mean = mean.detach().contiguous()
        dx = empty_strided(*self.dx_size) if self.dx_size else dx_out
        dw = empty_strided(*self.dw_size) if self.dw_size else dw_out
        third = empty_strided(*self.third_size) if self.third_size else None
        stream = raw_stream(self.device)
        # This also makes the device's context current in a thread that has not used it yet.
        run = self.capture if is_capturing() else self.enqueue
        addresses = (
            x.data_ptr(),
            dy.data_ptr(),
            rstd.data_ptr(),
            0 if weight is None else weight.data_ptr(),
            0 if dx is None else dx.data_ptr(),
            0 if dw is None else dw.data_ptr(),
            0 if dresidual is None else dresidual.data_ptr(),
            0 if third is None else third.data_ptr(),
        )
        run(stream, addresses, () if mean is None else (mean.data_ptr(),))
        for out in (dx_out, dw_out):
            if out is not None and not out.is_inference():
                torch.autograd.graph.increment_version(out)  # every write in place has to do that
        return (dx, dw, dx if third is None else third) if self.with_third else (dx, dw)

    def bind(self, stream: int) -> Binding:
        """A binding to a stream of the current device, kept for the next call."""
        workspace = self.workspaces.of_stream(self.device, stream)
        with workspace.lock:
            workspace.fit(self.launch)
            binding = self._bind(stream, workspace.zeros, workspace.scratch, workspace)
        # The handle of the per-thread default stream means another stream in every thread.
        if stream != PER_THREAD:
            if len(self.bindings) >= MOST_STREAMS:
                self.bindings.clear()
            self.bindings[stream] = binding
        return binding

    def _bind(self, stream: int, zeros: int, scratch: int, workspace: Any = None) -> Binding:
        at = (self.device, stream, zeros, scratch)
        return bind(self.kernel, self.launch, self.extent, *at, self.wants_dw, workspace)

    def enqueue(self, stream: int, leading: Sequence[int], behind: Sequence[int]) -> None:
        """Launch with the given addresses, in the order of the signature. Raises LaunchError."""
        binding = self.bindings.get(stream) or self.bind(stream)
        while True:
            with binding.lock:
                # A call with more scratch may have replaced the workspace.
                if binding.workspace.scratch == binding.scratch:
                    return binding.run(leading, behind)
            binding = self.bind(stream)

    def capture(self, stream: int, leading: Sequence[int], behind: Sequence[int]) -> None:
        """Launch into the graph that is being captured, with zeroed words of this capture and
        scratch from its pool."""
        zeros = self.workspaces.of_capture(self.device, stream, self.launch.scratch_offset)
        scratch = empty_strided((self.launch.scratch,), (1,), torch.float32)
        self._bind(stream, zeros, scratch.data_ptr()).run(leading, behind)


def _quick_call(slow: KernelCall) -> QuickCall:
    """Return the quick call of a kernel. It is one flat function, because every norm at every step
    pays for each attribute read and inner call in it."""
    device, bindings, bind_to = slow.device, slow.bindings, slow.bind
    assert slow.dx_size is not None and slow.dw_size is not None
    dx_shape, dx_strides, dx_dtype = slow.dx_size
    dw_shape, dw_strides, dw_dtype = slow.dw_size
    unaligned = MAX_ALIGNMENT - 1
    pack_addresses, behind_at = slow.arguments.pack_addresses, slow.arguments.behind_at

    def call(
        dy: torch.Tensor,
        x: torch.Tensor,
        rstd: torch.Tensor,
        weight: torch.Tensor,
        mean: torch.Tensor | None = None,
    ) -> Results | None:
        x_at, dy_at, weight_at = x.data_ptr(), dy.data_ptr(), weight.data_ptr()
        if (x_at | dy_at | weight_at) & unaligned:
            return None
        if current_device() != device:
            return slow(dy, x, rstd, weight, mean=mean)
        stream = raw_stream(device)
        # This also makes the device's context current in a thread that has not used it yet.
        if is_capturing():
            return slow(dy, x, rstd, weight, mean=mean)
        dx = empty_strided(dx_shape, dx_strides, dx_dtype)
        dw = empty_strided(dw_shape, dw_strides, dw_dtype)
        # fmt: off
        (
            workspace, lock, scratch, values, launch, main_config, main, main_arguments,
            sum_config, second, sum_arguments, _, _, _,
        ) = bindings.get(stream) or bind_to(stream)
        with lock:
            if workspace.scratch == scratch:
                pack_addresses(
                    values, 0, x_at, dy_at, rstd.data_ptr(), weight_at,
                    dx.data_ptr(), dw.data_ptr(), 0, 0,
                )
                if mean is not None:
                    pack_address(values, behind_at[0], mean.data_ptr())
                if launch(main_config, main, main_arguments, 0) == _DONE and (
                    second is None or launch(sum_config, second, sum_arguments, 0) == _DONE
                ):
                    return dx, dw
        # fmt: on
        return slow(dy, x, rstd, weight, mean=mean)  # take another workspace, or raise the error

    call.slow = slow  # type: ignore[attr-defined]
    return call
