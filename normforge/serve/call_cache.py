"""The cache of what serves which call, shared by the backward, the forward and `install()`.

What a call needs (checks, a kernel, strides, launch arguments) is found out once and kept here. A
call that comes back is recognised in two steps:

1. `recent`: at most 8 checks, tried in turn. One check is PyTorch's own of a compiled function's
   inputs, which compares type, dtype, device, sizes, strides, requires_grad and dispatch keys of
   all tensors in C++. Most trainings have a handful of kinds of calls, and reading a signature in
   Python costs seven times as much as a check.
2. `find`: by a key (shape, options, addresses modulo MAX_ALIGNMENT), under which there are checks
   of the same sort. It finds what `recent` has no place for.

Addresses are no part of a check: `recent` is for calls whose tensors are all aligned, and who takes
a call from there has to see that they are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from ..table import MAX_ALIGNMENT
from ..torch_internals import same_kind

Check = Callable[..., bool]

_MOST_RECENT = 8
_MOST_KEYS = 4096  # only a program whose M changes all the time meets more
_MOST_OF_A_KEY = 32
"""Kinds of calls with one shape: devices, strides, dtypes, with gradients and without."""
_MISSES_TO_FORGET = 256
"""A full list is kept for so many misses, so that a program of many shapes rarely renews it."""


class KnownCall(NamedTuple):
    """A known call. same: whether tensors are those of this call. call: what serves it. quick: what
    serves it in less time where all tensors are aligned; None for a call that is not to be in
    `recent`."""

    same: Check
    call: Any
    quick: Any


class CallCache:
    """The cache of what serves the calls of one function. Tuples are replaced, never changed, so
    that threads need no lock; two that meet a call for the first time may both prepare it.

    recent: checks, each with what is quick for its calls. All of them take equally many tensors.
    """

    def __init__(self) -> None:
        self.recent: tuple[tuple[Check, Any], ...] = ()
        self._device = "cuda"  # of the calls that are kept; "" for any
        self._by_key: dict[Hashable, tuple[KnownCall, ...]] = {}
        self._misses = 0

    def find_recent(self, tensors: tuple[Any, ...]) -> Any:
        """Return what is quick for one of the calls that are made most, None for any other. What is
        no tensor belongs to no call. Every eager norm of every step comes through here first."""
        if getattr(tensors[0], "is_nested", False):  # see `find`
            return None
        for same, quick in self.recent:
            if same(*tensors):
                return quick
        return None

    def find(self, kind: Hashable, tensors: Sequence[torch.Tensor]) -> KnownCall | None:
        """Return what was added for such a call. kind: says which tensors there are and all that
        counts beside them; the more it tells apart, the fewer checks are tried."""
        if any(tensor.is_nested for tensor in tensors):
            # Some have no strides, and PyTorch's check then ends the process instead of raising.
            return None
        for known in self._by_key.get(_key(kind, tensors), ()):
            if known.same(*tensors):
                if known.quick is not None:
                    self._prefer(known)
                return known
        return None

    def add(
        self, kind: Hashable, tensors: Sequence[torch.Tensor], call: Any, quick: Any = None
    ) -> None:
        """Recognise the next calls like this one, which `find` did not. Arguments as in `find` and
        KnownCall."""
        if self._device not in ("", tensors[0].device.type):
            return
        key = _key(kind, tensors)
        quick = quick if key is kind else None  # otherwise an address is not aligned
        listed = [] if quick is None else [same for same, _ in self.recent if same(*tensors)]
        known = KnownCall(listed[0] if listed else same_kind(*tensors), call, quick)
        if len(self._by_key) >= _MOST_KEYS:
            self._by_key.clear()
        self._by_key[key] = (*self._by_key.get(key, ())[1 - _MOST_OF_A_KEY :], known)
        if quick is not None:
            self._prefer(known)

    def _prefer(self, known: KnownCall) -> None:
        """Put a call into `recent` when there is, or ought to be, place."""
        recent = self.recent
        if len(recent) >= _MOST_RECENT:
            self._misses += 1
            if self._misses < _MISSES_TO_FORGET:
                return
            self._misses, recent = 0, ()
        # A call that is there was asked for by a way that does not look there.
        if not any(same is known.same for same, _ in self.recent):
            self.recent = (*recent, (known.same, known.quick))


def _key(kind: Hashable, tensors: Sequence[torch.Tensor]) -> Hashable:
    """Return the key of a call: `kind` itself where all addresses are aligned, else with the
    alignments, because kernels are chosen by them, too."""
    together = 0
    for tensor in tensors:
        together |= tensor.data_ptr()
    if together % MAX_ALIGNMENT == 0:
        return kind
    return kind, tuple(tensor.data_ptr() % MAX_ALIGNMENT for tensor in tensors)
