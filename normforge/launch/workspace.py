"""Device memory that the kernels need beside their outputs, and who may share it.

Zeroed words (counters, the places of a mailbox) are zero before a kernel and left zero by it. They
are taken from slabs that were zeroed once, outside every stream and graph, so their owner finds
zeros at every call with no memset. The launches of one owner are ordered. An owner is one of these:

- A stream. It is known by its raw handle, so it must have finished when it is destroyed: a new one
  may get its handle. The default stream of a thread is known by the thread's ident, and must have
  finished when the thread ends. A stream keeps its words for good.
- A call that is captured into a CUDA graph. Replays of one executable graph are ordered, and no two
  captures and no two branches of one share an owner. (Two executables made from one capture share
  their outputs as well, and must not run at the same time for that reason already.) This takes a
  few 128-byte lines per captured call: one for most, nine for a ledger of 256 slices of dw.
- A stream of one capture, for calls that take more, such as a mailbox, which has the partial dw of
  all CTAs. Its calls become nodes that depend on each other in that order. (Nobody may replace that
  stream's dependencies by cuStreamUpdateCaptureDependencies, or destroy it during the capture.)

Once a graph and all that was instantiated from it are gone, and their last launch has finished,
other owners get its words, which its kernels left zero. Memory from the graph's own pool would not
do: the pool may have lent the same bytes to another node of the graph, which dirties them at every
replay, so each captured call would need a memset.

Scratch may hold anything. Eager calls keep one block per stream, allocated by the driver in stream
order. It is kept out of PyTorch's allocator because PyTorch's CUDA-graph trees run their warm-up
with ordinary launches inside a private pool and expect that nothing in it outlives the step.
Captured calls take their scratch as a temporary of the graph's pool, like any operator does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..spec import Launch, round_up
from ..torch_internals import is_capturing
from .driver import LaunchError, checked, cuda_driver, during_capture
from .graph_end import GraphEnd, end_of

LINE = 128
"""Bytes of one L2 line: owners in different lines do not slow each other down."""
SLAB = 1 << 16
PER_THREAD = 2  # CU_STREAM_PER_THREAD
MOST_STREAMS = 64
"""Streams remembered per signature of a call."""
SHARED_FROM = 1 << 12
"""Bytes from which on the captured calls of one stream share their zeroed words."""
_NAME = "the workspace"


class Capture(NamedTuple):
    """A capture that is under way. id: tells it from all others of this process."""

    id: int
    graph: Any


class Zeros:
    """Zeroed memory of one device, handed out in whole lines. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0
        self._left = 0
        self._lent: dict[int, tuple[GraphEnd, list[tuple[int, int]]]] = {}  # by the capture's id
        self._returned: dict[int, list[int]] = {}  # addresses by size

    def take(self, size: int, capture: Capture | None = None) -> int:
        """Return the address of `size` zero bytes on the current device; 0 for none. They are the
        caller's for good, or until the graph of a capture has come to its end."""
        size = round_up(size, LINE)
        if size == 0:
            return 0
        with self._lock:
            self._take_back()
            known = self._returned.get(size)
            address = known.pop() if known else self._new(size)
            if capture is not None:
                if capture.id not in self._lent and (end := end_of(capture.graph)) is not None:
                    self._lent[capture.id] = (end, [])
                if capture.id in self._lent:
                    self._lent[capture.id][1].append((address, size))
        return address

    def _take_back(self) -> None:
        """Take back what belonged to graphs that are gone."""
        for capture in [id for id, (end, _) in self._lent.items() if end.reached()]:
            for address, size in self._lent.pop(capture)[1]:
                self._returned.setdefault(size, []).append(address)

    def _new(self, size: int) -> int:
        if size > SLAB // 2:
            return _zeroed_slab(size)
        if size > self._left:
            self._left, self._next = SLAB, _zeroed_slab(SLAB)
        address = self._next
        self._next += size
        self._left -= size
        return address


def _zeroed_slab(size: int) -> int:
    """New zeroed memory. The memset runs on a stream of its own and is waited for, so that neither
    a capture under way nor any other stream has a part in it."""
    driver = cuda_driver()
    action = "zeroing"
    with during_capture(_NAME):
        slab = int(_allocated(lambda: driver.cuMemAlloc(size), size))
        aside = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        stream = checked(driver.cuStreamCreate(aside), action, _NAME)
        try:
            checked(driver.cuMemsetD8Async(slab, 0, size, stream), action, _NAME)
            checked(driver.cuStreamSynchronize(stream), action, _NAME)
        finally:
            checked(driver.cuStreamDestroy(stream), action, _NAME)
    return slab


def _allocated(allocate: Callable[[], tuple[Any, ...]], size: int) -> Any:
    """Return what a driver call allocates. It is called once more when PyTorch may hold the missing
    memory unused."""
    action = f"allocating {size} bytes for"
    try:
        return checked(allocate(), action, _NAME)
    except LaunchError as error:
        if error.code != "CUDA_ERROR_OUT_OF_MEMORY" or is_capturing():
            raise
        torch.cuda.empty_cache()
        return checked(allocate(), action, _NAME)


def _capture_of(stream: int) -> Capture | None:
    """The capture that is under way on a stream; None where the driver does not say."""
    driver = cuda_driver()
    status, *info = driver.cuStreamGetCaptureInfo(stream)
    active = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    return Capture(int(info[1]), info[2]) if status == 0 and info[0] == active else None


class StreamWorkspace:
    """The memory that the eager calls of a package on one stream share.

    Hold `lock` from `fit` to the last launch of a call: a second thread on the same stream must
    not launch between the two kernels of one call, nor see a block that is being replaced.
    """

    def __init__(self, stream: int, zeros: Zeros) -> None:
        self.lock = threading.Lock()
        self.zeros, self._zero_bytes = 0, 0
        self.scratch, self.scratch_words = 0, 0
        self._stream, self._source = stream, zeros

    def fit(self, launch: Launch) -> None:
        """Make `zeros` and `scratch` large enough for a launch. Raises LaunchError."""
        if launch.scratch_offset > self._zero_bytes:
            self.zeros = self._source.take(launch.scratch_offset)
            self._zero_bytes = launch.scratch_offset
        if launch.scratch > self.scratch_words:
            self._replace_scratch(launch.scratch)

    def _replace_scratch(self, words: int) -> None:
        driver = cuda_driver()
        with during_capture(_NAME):
            old, self.scratch, self.scratch_words = self.scratch, 0, 0
            if old:
                # Free it in stream order: kernels launched before still use it, and none after.
                checked(driver.cuMemFreeAsync(old, self._stream), "freeing", _NAME)
            size = words * 4
            block = _allocated(lambda: driver.cuMemAllocAsync(size, self._stream), size)
            self.scratch, self.scratch_words = int(block), words


class Workspaces:
    """The workspaces of one package, by device and stream; its C++ has others."""

    def __init__(self) -> None:
        self._zeros: dict[int, Zeros] = {}
        self._captures: dict[tuple[int, int], tuple[int, int, int]] = {}  # id, address, size
        self._streams: dict[tuple[int, int, int], StreamWorkspace] = {}

    def zeros(self, device: int) -> Zeros:
        """The zeroed words of a device, which must be the current one when they are taken."""
        return self._zeros.get(device) or self._zeros.setdefault(device, Zeros())

    def of_capture(self, device: int, stream: int, size: int) -> int:
        """Return the address of `size` zero bytes for a call that a raw stream of a device
        captures."""
        capture = _capture_of(stream) if size else None
        if capture is None or size < SHARED_FROM:
            return self.zeros(device).take(size, capture)
        known = self._captures.get((device, stream))
        if known is None or known[0] != capture.id or known[2] < size:
            address = self.zeros(device).take(size, capture)
            known = self._captures[device, stream] = (capture.id, address, size)
        return known[1]

    def of_stream(self, device: int, stream: int) -> StreamWorkspace:
        """Return the workspace that eager calls on a raw stream of a device share."""
        # The handle of the per-thread default stream names another stream in every thread.
        thread = threading.get_ident() if stream == PER_THREAD else 0
        found = self._streams.get((device, stream, thread))
        if found is None:
            new = StreamWorkspace(stream, self.zeros(device))
            found = self._streams.setdefault((device, stream, thread), new)
        return found
