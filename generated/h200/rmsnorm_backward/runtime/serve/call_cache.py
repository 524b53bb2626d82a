"""Calls that are recognised in one step, instead of by a signature read attribute by attribute.

PyTorch's own check of a compiled function's inputs compares type, dtype, device, sizes, strides,
requires_grad and dispatch keys of all tensors in C++. A call that came back gets such a check; as
most trainings have a handful of signatures, trying them in turn is cheaper than reading one. Calls
beyond a handful are found by a key, which costs more than a few checks and less than a signature.
Addresses are no part of a check: who uses it must see that they are multiples of MAX_ALIGNMENT.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from ..table import MAX_ALIGNMENT
from ..torch_internals import same_kind

Check = Callable[..., bool]

_MOST = 8
"""Checks that are tried in turn, and those that one key holds."""
_MOST_KEYS = 1024
_MISSES_TO_FORGET = 256
"""A full list is kept for so many misses, so that a program of many shapes rarely renews it."""


class Known:
    """The checks of calls of one function. Tuples are replaced, never changed, so that threads need
    no lock.

    recent: checks, each with what serves its calls, for the function to try in turn. All of them
    take the same number of tensors.
    device: the type of device whose calls are worth a check, by default every one.
    """

    def __init__(self, device: str = "") -> None:
        self.recent: tuple[tuple[Check, Any], ...] = ()
        self._device = device
        self._by_key: dict[Hashable, tuple[tuple[Check, Any, Any], ...]] = {}
        self._misses = 0

    def __len__(self) -> int:
        """How many checks a call may meet in `recent`."""
        return len(self.recent)

    def find(self, key: Hashable, tensors: Sequence[torch.Tensor]) -> Any:
        """What serves a call that `recent` does not know, None when it is not known here either or
        when an address is not aligned.

        key: says which tensors there are and all that counts beside them; the more it tells apart,
        the fewer checks are tried.
        """
        for same, call, quick in self._by_key.get(key, ()):
            if same(*tensors):
                if not _aligned(tensors):
                    return None
                if quick is not None:
                    self._prefer(same, quick)
                return call
        return None

    def add(
        self, key: Hashable, tensors: Sequence[torch.Tensor], call: Any, quick: Any = None
    ) -> None:
        """Recognise the next calls like this one, which `find` did not.

        call: what `find` gives for them. quick: what `recent` has for them, None for calls that are
        not to be there.
        """
        if (self._device and tensors[0].device.type != self._device) or not _aligned(tensors):
            return
        listed = [] if quick is None else [same for same, _ in self.recent if same(*tensors)]
        same = listed[0] if listed else same_kind(*tensors)
        if same is None:
            return
        if len(self._by_key) >= _MOST_KEYS:
            self._by_key.clear()
        entries = self._by_key.get(key, ())[1 - _MOST :]
        self._by_key[key] = (*entries, (same, call, quick))
        if quick is not None:
            self._prefer(same, quick)

    def _prefer(self, same: Check, quick: Any) -> None:
        """Put a call into `recent` when there is, or ought to be, place."""
        recent = self.recent
        if len(recent) >= _MOST:
            self._misses += 1
            if self._misses < _MISSES_TO_FORGET:
                return
            self._misses = 0
        # A call that is there was asked for by a way that does not look there.
        if not any(known is same for known, _ in recent):
            self.recent = (*(recent if len(recent) < _MOST else ()), (same, quick))


def _aligned(tensors: Sequence[torch.Tensor]) -> bool:
    together = 0
    for tensor in tensors:
        together |= tensor.data_ptr()
    return together % MAX_ALIGNMENT == 0
