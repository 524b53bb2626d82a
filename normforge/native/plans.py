"""Describes calls to the C++ fast path: a plan for each kind and stream.

Why a native launch is ordered with all others of its stream:
- Its workspaces are its own, one per stream and package, and one lock of that stream spans both
  kernels of a call. So no other call that uses the same scratch comes between the two, and a call
  through Python may, as it uses other memory.
- Counters and mailboxes are zero before a kernel and left zero by it, and kernels of one stream
  run one after the other: every launch finds zeros, whoever launched the one before. A plan keeps
  the counters that it was made with; they are never given back. A later plan of the stream that
  needs more gets others.
- Scratch may hold anything at the start of a call. While a plan is made, or room for one, the
  stream is paused: that waits for a launch under way, and calls go to Python meanwhile. An old
  block that is too small is freed in stream order, behind all kernels that use it, and the new one
  allocated in stream order, before all that will. Then the stream resumes, and all its plans use
  the new address, because they read it at every launch.
  Where there is no memory for the new block, one as large as the old is asked for; without that the
  stream stays paused until there is a block that is large enough for all of its plans.
- A stream that is being captured is served by Python, and so is the per-thread default stream,
  whose handle names another stream in every thread.
- A refused launch is done again by Python, both kernels of it.
- A forward keeps nothing on the device, so its plans need none of this but a lock for its block of
  arguments.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..launch.forward_call import pack_arguments
from ..launch.kernel_arguments import DW_IN_WEIGHT_DTYPE
from ..launch.workspace import PER_THREAD, StreamWorkspace, Workspaces
from ..serve.call import KernelCall
from ..spec import Launch
from ..torch_internals import current_device, is_capturing, raw_stream

_MOST_PLANS = 1024
_BACKWARD, _FORWARD, _ADD_FORWARD = range(3)  # as in native.h
_NO_KERNEL = (0, 0, b"")
_kept: list[Any] = []


class _Key(NamedTuple):
    """The key by which C++ knows a plan."""

    kind: int
    device: int
    stream: int
    rows: int
    columns: int
    dtype: torch.dtype
    weight_dtype: torch.dtype


def keep(of_cpp: Any) -> None:
    """Keep what C++ has addresses of, for the life of the process."""
    _kept.append(of_cpp)


class Plans:
    """Describes calls to a store: those of one signature on one stream, once each."""

    def __init__(self, store: Any) -> None:
        self._store, self._workspaces = store, Workspaces()
        self._seen: set[tuple[Any, ...]] = set()
        self._needed: dict[tuple[int, int], int] = {}  # words of scratch, by device and stream

    def learn(self, quick: Any) -> None:
        """Let later calls like the one just served on the current stream be served natively. Does
        nothing for a call of another kind, or beyond a number of plans.

        quick: what `recent` of the call cache has for such a call, or None."""
        call = getattr(quick, "slow", None)
        if call is None or not _is_dense(call):
            return
        rows, columns, dtype = call.extent.rows, call.extent.columns, call.dx_size[2]
        key = self._new_key(_BACKWARD, call.device, rows, columns, dtype, call.dw_size[2])
        if key is not None:
            with suppress(RuntimeError):  # no memory for another workspace: Python has one
                self._add(call, key)

    def learn_forward(self, call: Any) -> None:
        """Let later calls of a forward like this one be served natively. call: what its call cache
        has."""
        facts = getattr(call, "facts", None)
        if facts is None:
            return
        kernel, extent = facts.kernel, facts.extent
        kind = _ADD_FORWARD if facts.with_residual else _FORWARD
        key = self._new_key(kind, facts.device, extent.rows, extent.columns, *facts.dtypes)
        if key is None:
            return
        function = kernel.load(facts.device)[facts.with_residual]
        config = kernel.main_config(kernel.spec.grid(extent.rows), key.stream)
        main = _described(config, function, [0])
        self._store.add(*key, pack_arguments(extent), b"", main, _NO_KERNEL)

    def _new_key(self, kind: int, device: int, *signature: Any) -> _Key | None:
        """The key of a plan of the current stream, once for each that is to be made."""
        if current_device() != device:
            return None
        stream = raw_stream(device)
        known = (kind, device, stream, *signature)  # a plain tuple, as a _Key takes longer to make
        if known in self._seen or len(self._seen) >= _MOST_PLANS:
            return None
        if stream == PER_THREAD or is_capturing():
            return None
        self._seen.add(known)
        return _Key(*known)

    def reserve(self, device: int, stream: int, launch: Launch) -> None:
        """Make room for a launch on a stream, so that learning it takes no memory. Where there is
        none, Python serves such calls, as after learning in vain."""
        if stream == PER_THREAD or is_capturing():
            return
        with suppress(RuntimeError), self._paused(device, stream, launch):
            pass

    def _add(self, call: KernelCall, key: _Key) -> None:
        kernel, launch = call.kernel, call.launch
        with self._paused(key.device, key.stream, launch) as workspace:
            main, second = kernel.load(key.device)
            layout = call.arguments
            main_at, second_at = layout.parameters
            block = layout.block(launch, call.extent, workspace.zeros, workspace.scratch)
            config = kernel.main_config(launch.grid, key.stream)
            kernels = [_described(config, main, main_at), _NO_KERNEL]
            if second is not None:
                config = kernel.sum_config(launch.sum_grid, key.stream)
                kernels[1] = _described(config, second, second_at)
            self._store.add(*key, block.raw, _words(layout.scratch_at), *kernels)

    @contextmanager
    def _paused(self, device: int, stream: int, launch: Launch) -> Iterator[StreamWorkspace]:
        """The workspace of a stream, with room for a launch. Calls go to Python until the end."""
        workspace = self._workspaces.of_stream(device, stream)
        with workspace.lock:
            needed = self._needed.get((device, stream), 0)
            self._store.set_scratch(device, stream, None)
            try:
                workspace.fit(replace(launch, scratch=max(needed, launch.scratch)))
                needed = self._needed[device, stream] = max(needed, launch.scratch)
                yield workspace
            finally:
                if workspace.scratch_words < needed:  # given back for more, which there is not
                    with suppress(RuntimeError):
                        workspace.fit(replace(launch, scratch=needed))
                if workspace.scratch_words >= needed:
                    self._store.set_scratch(device, stream, workspace.scratch)


def _described(config: Any, function: Any, offsets: Sequence[int]) -> tuple[int, int, bytes]:
    """A kernel as C++ takes it: configuration, function, and where its parameters begin in the
    block of arguments."""
    keep((config, function))
    return int(config.getPtr()), int(function), _words(offsets)


def _is_dense(call: KernelCall) -> bool:
    extent = call.extent
    return (
        set(extent.strides) == {extent.columns}
        and extent.gap_factor == 0
        and extent.dw_mode == DW_IN_WEIGHT_DTYPE
        and extent.weight_offset == 0
        and call.dw_size is not None
        and call.dw_size[0] == (extent.columns,)
    )


def _words(numbers: Sequence[int]) -> bytes:
    return array("Q", numbers).tobytes()
