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
- A kernel without a workspace, such as a forward's, keeps nothing on the device, so its plans need
  none of this but a lock for its block of arguments.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..launch.forward_call import PLACES, pack_arguments
from ..launch.kernel_arguments import DW_IN_WEIGHT_DTYPE, Extent, argument_layout
from ..launch.workspace import PER_THREAD, StreamWorkspace, Workspaces
from ..operations import signature_of
from ..spec import Launch
from ..torch_internals import current_device, is_capturing, raw_stream
from .kinds import BACKWARD, FORWARD, FORWARD_OF_THREE, Kinds

_MOST_PLANS = 1024
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

    def __init__(self, store: Any, kinds: Kinds) -> None:
        self._store, self._kinds, self._workspaces = store, kinds, Workspaces()
        self._seen: set[tuple[Any, ...]] = set()
        self._needed: dict[tuple[int, int], int] = {}  # words of scratch, by device and stream

    def learn(self, quick: Any) -> None:
        """Let later calls like the backward just served on the current stream be served natively.
        Does nothing for a call of another kind, or beyond a number of plans.

        quick: what `recent` of the call cache has for such a call, or None."""
        call = getattr(quick, "slow", None)
        if call is not None:
            self._learn(BACKWARD, call, call.device, call.dx_size[2], call.dw_size[2])

    def learn_rows(self, call: Any, given: Mapping[str, Any]) -> None:
        """Let later calls like one of a server of rows, on the current device, be served natively.
        call: a RowCall; given: its arguments by name."""
        names = {name for name, one in given.items() if one is not None}
        for which, kind in enumerate(self._kinds):
            if names == {*(tensor.name for tensor in kind.given), *kind.numbers}:
                first = {tensor.role: given[tensor.name].dtype for tensor in kind.given}
                self._learn(which, call, current_device(), first["rows"], first["columns"])

    def learn_forward(self, call: Any) -> None:
        """Let later calls of RMSNorm's forward like this one be served natively. call: what its
        call cache has."""
        facts = getattr(call, "facts", None)
        if facts is None:
            return
        kernel, extent = facts.kernel, facts.extent
        kind = FORWARD_OF_THREE if facts.with_residual else FORWARD
        key = self._new_key(kind, facts.device, extent.rows, extent.columns, *facts.dtypes)
        if key is None:
            return
        function = kernel.load(facts.device)[facts.with_residual]
        config = kernel.main_config(kernel.spec.grid(extent.rows), key.stream)
        main = _described(config, function, [0])
        self._tell(key, pack_arguments(extent), PLACES, (), main, _NO_KERNEL)

    def _learn(self, kind: int, call: Any, device: int, *dtypes: torch.dtype) -> None:
        """Make a plan for a call with `kernel`, `launch` and `extent` where it is plain."""
        if not _is_dense(call.extent):
            return
        key = self._new_key(kind, device, call.extent.rows, call.extent.columns, *dtypes)
        if key is not None:
            with suppress(RuntimeError):  # no memory for another workspace: Python has one
                self._add(call, key)

    def _tell(
        self, key: _Key, block: bytes, places: Mapping[str, int], scratch: Any, *kernels: Any
    ) -> None:
        """Give a plan to C++. places: the offsets of tensors and numbers by name; scratch: those of
        the address of scratch."""
        at = _words([places[name] for name in self._kinds[key.kind].names])
        self._store.add(*key, block, at, _words(scratch), *kernels)

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

    def _add(self, call: Any, key: _Key) -> None:
        kernel, launch = call.kernel, call.launch
        layout = argument_layout(signature_of(kernel.spec.operation))
        needs = launch.workspace_bytes > 0
        paused = self._paused(key.device, key.stream, launch) if needs else nullcontext(None)
        with paused as workspace:
            main, second = kernel.load(key.device)
            main_at, second_at = layout.parameters
            at = (workspace.zeros, workspace.scratch) if workspace else (0, 0)
            block = layout.block(launch, call.extent, *at)
            config = kernel.main_config(launch.grid, key.stream)
            kernels = [_described(config, main, main_at), _NO_KERNEL]
            if second is not None:
                config = kernel.sum_config(launch.sum_grid, key.stream)
                kernels[1] = _described(config, second, second_at)
            places, scratch = layout.places | layout.numbers_at, layout.scratch_at if needs else ()
            self._tell(key, block.raw, places, scratch, *kernels)

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


def _is_dense(extent: Extent) -> bool:
    return (
        set(extent.strides) == {extent.columns}
        and extent.gap_factor == 0
        and extent.dw_mode == DW_IN_WEIGHT_DTYPE
        and extent.weight_offset == 0
    )


def _words(numbers: Sequence[int]) -> bytes:
    return array("Q", numbers).tobytes()
