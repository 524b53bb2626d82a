"""Counts the problems that reach the norms of a program, for `tune.py --shapes`.

Off, a call pays for one look at `collecting.recorder`. On, it adds to a dictionary; a thread of its
own writes the file every half minute, and the end of the process does. Nothing of this raises an
error in a call.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, repeat
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..collected import add_to_file
from ..shape_names import shape_name
from .options import DTYPES

VARIABLE = "NORMFORGE_COLLECT"
_FIRST_SECONDS, _SECONDS = 2.0, 30.0
"""Seconds until the file is first written, which tells early that it cannot be, and between later
writes."""
_MOST = 10_000
"""Kinds of calls that a process keeps apart, until it writes them."""


class Called(NamedTuple):
    """A problem, as Problem of the tuner, with dtypes by their short names."""

    operation: str
    M: int
    N: int
    dtype: str
    weight_dtype: str
    offset: bool = False
    residual: str = ""
    rotation: str = ""


Totals = Callable[[], Iterable[tuple[Called, int]]]
"""Calls that somebody else counts, since the beginning of the process."""


class Recorder:
    """Counts calls, and adds them to a file. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._said: set[str] = set()
        self._begin()
        self._seen = Counter(dict(_totals()))
        self._start()

    def _begin(self) -> None:
        """Reset the state, as a process begins. It may be a fork of another: what was counted there
        is written there."""
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._kinds: dict[_Kind, int] = {}
        self._unwritten: Counter[Called] = Counter()
        self._local = threading.local()
        self._stopped = threading.Event()
        self._finalizer: Finalize | None = None

    @property
    def inside(self) -> bool:
        """True when this thread is inside of a call that counts."""
        return getattr(self._local, "inside", False)

    @contextmanager
    def call(
        self,
        operation: str,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        offset: bool,
        dresidual: torch.Tensor | None,
    ) -> Iterator[None]:
        """A context for a call that counts once, though it is made of several, if it does not
        fail."""
        self._local.inside = True
        try:
            yield
        finally:
            self._local.inside = False
        self.count(operation, x, weight, offset, dresidual)

    def count(
        self,
        operation: str,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        offset: bool = False,
        dresidual: torch.Tensor | None = None,
        rotation: str = "",
    ) -> None:
        """Count a call by its tensors. Never raises."""
        try:
            added = None if dresidual is None else dresidual.dtype
            kind = (operation, type(x), x.shape, x.dtype, _kind(weight), offset, added, rotation)
            with self._lock:
                count = self._kinds.get(kind, 0)
                known = count > 0 or len(self._kinds) < _MOST
                if known:
                    self._kinds[kind] = count + 1
            if not known:
                self._warn(
                    f"{self.path} does not get all calls of norms: more than {_MOST} shapes came "
                    f"within {_SECONDS:g} s"
                )
            if self._finalizer is None:
                self._start()
        except Exception:  # x may be no tensor, or the process ends
            pass

    def _start(self) -> None:
        """Start to write in the background, when the counting begins, and at the first call in a
        fork."""
        with self._lock:
            if self._finalizer is not None:
                return
            # Unlike atexit, also at the end of a process that multiprocessing has forked.
            self._finalizer = Finalize(None, self.write, exitpriority=0)
        threading.Thread(target=self._write_often, daemon=True).start()

    def _write_often(self) -> None:
        stopped = self._stopped
        for seconds in chain((_FIRST_SECONDS,), repeat(_SECONDS)):
            if stopped.wait(seconds):
                return
            with suppress(Exception):  # what was not written is tried again
                self.write()

    def write(self) -> None:
        """Add what was counted since the last time to the file, now. Where that cannot be, the
        counts are kept for the next time, and one warning says why."""
        with self._writing:
            counts = self._take()
            if not counts:
                return
            named: Counter[tuple[str, str]] = Counter()
            for called, count in counts.items():
                named[called.operation, shape_name(*called[1:])] += count
            try:
                add_to_file(self.path, named)
            except BaseException as error:
                self._unwritten = counts
                if not isinstance(error, OSError | ValueError):  # such as Ctrl-C
                    raise
                reason = getattr(error, "strerror", None) or error
                self._warn(
                    f"{self.path} does not get the calls of norms that were counted ({reason}): "
                    "choose a file that can be written"
                )

    def stop(self) -> None:
        """Write, and count no more."""
        if collecting.recorder is self:
            collecting.recorder = None
        self._stopped.set()
        self.write()
        if self._finalizer is not None:
            self._finalizer.cancel()

    def _take(self) -> Counter[Called]:
        totals = Counter(dict(_totals()))
        with self._lock:
            kinds, self._kinds = self._kinds, {}
        counts, self._unwritten = self._unwritten, Counter()
        counts.update(totals - self._seen)
        self._seen = totals
        for kind, count in kinds.items():
            if (found := _called(kind)) is not None:
                called, times = found
                counts[called] += count * times
        return counts

    def _warn(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            try:
                warnings.warn(sentence, stacklevel=2)
            except Warning:  # the program has made warnings errors
                print(sentence, file=sys.stderr)


_Kind = tuple[str, type, torch.Size, torch.dtype, "tuple[torch.dtype, int] | None", bool, Any, str]
"""The kind of a call: operation, class, shape and dtype of x, the weight's dtype and heads (1 for a
weight that all share), whether there is an offset, the dtype of a dresidual, and the rotation."""


def _kind(weight: torch.Tensor | None) -> tuple[torch.dtype, int] | None:
    if weight is None:
        return None
    return weight.dtype, 1 if weight.dim() < 2 else weight.shape[0]


def _called(kind: _Kind) -> tuple[Called, int] | None:
    """The problem that a kernel would solve, and how often; None for what no kernel takes."""
    operation, of, shape, of_rows, weight, offset, added, rotation = kind
    dtype = DTYPES.get(of_rows)
    if dtype is None or issubclass(of, FakeTensor) or shape.numel() == 0:
        return None
    weight_dtype, heads = (dtype, 1) if weight is None else (DTYPES.get(weight[0], ""), weight[1])
    if weight_dtype not in (dtype, "fp32"):
        return None
    # A dresidual of any other dtype is added outside of the kernel.
    residual = DTYPES.get(added, "")
    residual = residual if residual in (dtype, "fp32") else ""
    rows = shape.numel() // shape[-1] // heads  # a call for each head
    options = (offset, residual, rotation)
    return Called(operation, rows, shape[-1], dtype, weight_dtype, *options), heads


class Collecting:
    """The recorder that counts calls, None where nothing does."""

    __slots__ = ("recorder",)

    def __init__(self) -> None:
        self.recorder: Recorder | None = None


collecting = Collecting()
_sources: list[Totals] = []


def count_also(totals: Totals) -> None:
    """Count calls from `totals`, too, which do not come by here."""
    _sources.append(totals)


def _totals() -> Iterator[tuple[Called, int]]:
    total: Counter[Called] = Counter()
    for source in _sources:
        for called, count in source():
            total[called] += count
    yield from total.items()


class _Fork:
    """The state of a fork. with_cuda: the last fork was one in which CUDA does not work, because it
    did before."""

    with_cuda = False


def _before_fork() -> None:
    _Fork.with_cuda = torch.cuda.is_initialized()


def _after_fork() -> None:
    if _Fork.with_cuda:
        _sources.clear()  # their objects have locks, and they count no more
    if (recorder := collecting.recorder) is not None:
        recorder._begin()
        recorder._seen = Counter(dict(_totals()))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


def collect(path: str | os.PathLike[str] | None = None) -> Recorder:
    """See normforge.collect."""
    former = collecting.recorder
    if former is not None and path is None:
        return former
    named = os.fspath(os.environ.get(VARIABLE, "") if path is None else path)
    if not named.strip():
        raise ValueError(
            f"name a file for the calls of norms: collect('shapes.yaml'), or set {VARIABLE}"
        )
    file = Path(named).expanduser().absolute()
    if former is not None and former.path == file:
        return former
    collecting.recorder = recorder = Recorder(file)
    if former is not None:
        with recorder._writing:  # counts from elsewhere go to one of the two files
            former.stop()
            recorder._seen = former._seen
    return recorder


if os.environ.get(VARIABLE, "").strip():
    collect()
