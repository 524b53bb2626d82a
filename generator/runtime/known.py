"""Calls that are recognised in one step, instead of by a signature read attribute by attribute.

PyTorch's own check of a compiled function's inputs compares type, dtype, device, sizes, strides,
requires_grad and dispatch keys of all tensors in C++. A call that came back gets such a check; as
most trainings have a handful of signatures, trying them in turn is cheaper than reading one.
Addresses are no part of the check: who uses it must see that they are multiples of MAX_ALIGNMENT.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .cuda import same_kind
from .dispatch import MAX_ALIGNMENT
from .options import PLAIN, Arguments, Options

Check = Callable[..., bool]

_MOST = 8
"""Checks that are tried in turn."""
_MISSES_TO_FORGET = 256
"""A full list is kept for so many misses, so that a program of many shapes rarely renews it."""


class Known:
    """The checks of one package. Lists are replaced, never changed, so that threads need no lock.

    plain: checks of dy, x, rstd and weight, with the quick call of a kernel.
    """

    def __init__(self) -> None:
        self.plain: tuple[tuple[Check, Any], ...] = ()
        self._others: dict[Any, tuple[tuple[Check, Any], ...]] = {}
        self._misses = 0

    def find(self, given: Arguments, options: Options) -> Any:
        """What serves a call with options, None when it is not known."""
        entries = self._others.get(_key(given, options))
        if entries:
            tensors = [tensor for tensor in vars(given).values() if tensor is not None]
            for same, call in entries:
                if same(*tensors):
                    return call if _aligned(tensors) else None
        return None

    def add(self, call: Any, given: Arguments, options: Options) -> None:
        """Recognise the next calls like this one."""
        tensors = [tensor for tensor in vars(given).values() if tensor is not None]
        if not given.x.is_cuda or not _aligned(tensors):
            return
        key = _key(given, options)
        quick = getattr(call, "quick", None) if options == PLAIN else None
        entries = self.plain if quick else self._others.get(key, ())
        if any(same(*tensors) for same, _ in entries):
            return  # known, but asked for by a way that does not look here
        if len(entries) >= _MOST:
            self._misses += 1
            if self._misses < _MISSES_TO_FORGET:
                return
            self._misses, entries = 0, ()
        same = same_kind(*tensors)
        if same is None:
            return
        entries = (*entries, (same, quick or call))
        if quick:
            self.plain = entries
        else:
            self._others[key] = entries


def _key(given: Arguments, options: Options) -> Any:
    """Which tensors there are, and the options."""
    return (given.weight is None, given.dresidual is None, given.dw_out is None, options)


def _aligned(tensors: list[Any]) -> bool:
    together = 0
    for tensor in tensors:
        together |= tensor.data_ptr()
    return together % MAX_ALIGNMENT == 0
