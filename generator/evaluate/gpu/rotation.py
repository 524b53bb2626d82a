"""The two states of the L2 in which operations are timed: flushed before each, or holding what
others have left, while inputs and outputs rotate through more memory than it has. No CUDA here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

FLUSH, ROTATION = "flush", "rotation"
CONDITIONS = {
    FLUSH: "before each operation, reads with evict_last and then writes displace what the L2 has",
    ROTATION: "nothing between operations; each takes the inputs and outputs used longest ago",
}

Timed = Callable[[], object]
"""Launches one whole operation on the current stream, without waiting."""
Operation = Timed | Sequence[Timed]
"""An operation to time: a call, or the same call on one set of inputs and outputs after another."""

SETS, SETS_BYTES, L2_TIMES = 6, 192 << 20, 2
"""The least through which sets rotate: so many, so many bytes, and so many times the L2."""
MOST_SETS = 1024
"""The most sets that rotate. Where displacing the L2 takes more, the inputs are so small that there
is one set, which is flushed."""


def sets_for(set_bytes: int, l2_bytes: int, free_bytes: int) -> int:
    """Return the number of sets that rotate, 1 for none. set_bytes: bytes of one set of inputs and
    outputs; free_bytes: room for more sets and for what their floors need, which can be as much
    again. One set comes on top, because what an operation reads is not yet displaced by itself."""
    needed = -(-max(SETS_BYTES, L2_TIMES * l2_bytes) // set_bytes) + 1
    most = 1 + free_bytes // 4 // set_bytes
    if needed > min(MOST_SETS, most):
        return 1
    return max(needed, min(SETS, most))


def copies(inputs: Any, number: int) -> list[Any]:
    """A dataclass of inputs, and so many less one with copies of all of its tensors."""
    tensors = [each.name for each in fields(inputs) if torch.is_tensor(getattr(inputs, each.name))]
    return [inputs] + [
        replace(inputs, **{name: getattr(inputs, name).clone() for name in tensors})
        for _ in range(number - 1)
    ]


def calls_of(operation: Operation) -> Sequence[Timed]:
    """Return the calls of an operation, one for each set."""
    return operation if isinstance(operation, Sequence) else (operation,)
