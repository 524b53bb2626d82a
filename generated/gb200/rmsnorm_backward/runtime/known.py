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
_MOST_KEYS = 1024
"""Kinds of calls (options and shapes) that are remembered beside those."""
_MISSES_TO_FORGET = 256
"""A full list is kept for so many misses, so that a program of many shapes rarely renews it."""


class Known:
    """The checks of one package. Lists are replaced, never changed, so that threads need no lock.

    plain: checks of dy, x, rstd and weight, with the quick call of a kernel. Calls beyond _MOST of
    them are found by their shape, which costs more than those and less than a signature.
    device: the type of device whose calls are worth a check.
    """

    def __init__(self, device: str = "cuda") -> None:
        self.plain: tuple[tuple[Check, Any], ...] = ()
        self._device = device
        self._others: dict[Any, tuple[tuple[Check, Any], ...]] = {}
        self._misses = 0

    def find(self, given: Arguments, options: Options) -> Any:
        """What serves a call that `plain` does not know, None when it is not known here either."""
        entries = self._others.get(_key(given, options))
        if entries:
            tensors = [tensor for tensor in vars(given).values() if tensor is not None]
            for same, call in entries:
                if same(*tensors):
                    if not _aligned(tensors):
                        return None
                    self._prefer(same, call, options)
                    return call
        return None

    def add(self, call: Any, given: Arguments, options: Options) -> None:
        """Recognise the next calls like this one."""
        tensors = [tensor for tensor in vars(given).values() if tensor is not None]
        if given.x.device.type != self._device or not _aligned(tensors):
            return
        key = _key(given, options)
        entries = self._others.get(key, ())
        plain = self.plain if _quick(call, options) else ()
        if any(same(*tensors) for same, _ in (*plain, *entries)):
            return  # known, but asked for by a way that does not look here
        same = same_kind(*tensors)
        if same is None or self._prefer(same, call, options):
            return
        if len(self._others) >= _MOST_KEYS:
            self._others.clear()
        self._others[key] = (*entries[1 - _MOST :], (same, call))

    def _prefer(self, same: Check, call: Any, options: Options) -> bool:
        """Whether a call is in `plain`, into which it is put when it may be there and there is, or
        ought to be, place."""
        quick = _quick(call, options)
        if quick is None:
            return False
        if any(known is same for known, _ in self.plain):
            return True  # asked for by a way that does not look there
        if len(self.plain) >= _MOST:
            self._misses += 1
            if self._misses < _MISSES_TO_FORGET:
                return False
            self._misses, self.plain = 0, ()
        self.plain = (*self.plain, (same, quick))
        return True


def _quick(call: Any, options: Options) -> Any:
    """What `plain` keeps of a call, None for one that it does not take."""
    return getattr(call, "quick", None) if options == PLAIN else None


def _key(given: Arguments, options: Options) -> Any:
    """Which tensors there are, the shape of x, and the options."""
    here = (given.weight is None, given.dresidual is None, given.dw_out is None)
    return (*here, given.x.shape, options)


def _aligned(tensors: list[Any]) -> bool:
    together = 0
    for tensor in tensors:
        together |= tensor.data_ptr()
    return together % MAX_ALIGNMENT == 0
