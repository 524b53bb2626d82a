"""Tensors between guard bytes, which show what a kernel writes outside its outputs."""

from __future__ import annotations

from math import prod

import torch

GUARD_BYTES = 4096
"""Bytes before and after every output that no kernel may touch."""
_GUARD = 0xA5


class Guarded:
    """A tensor with guard bytes around it."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.bytes = prod(shape) * dtype.itemsize
        padded = (self.bytes + 255) // 256 * 256
        self.buffer = torch.full(
            (2 * GUARD_BYTES + padded,), _GUARD, dtype=torch.uint8, device=device
        )
        self.inside = self.buffer[GUARD_BYTES : GUARD_BYTES + self.bytes]
        self.tensor = self.inside.view(dtype).view(shape)

    def arm(self) -> None:
        """Put the guards back: what an earlier kernel did to them is not the next one's fault."""
        self.buffer[:GUARD_BYTES] = _GUARD
        self.buffer[GUARD_BYTES + self.bytes :] = _GUARD

    def poison(self, byte: int = 0xFF) -> None:
        """Fill the inside with one byte. 0xFF in all of them is a NaN in every dtype served."""
        self.inside.fill_(byte)

    def intact(self) -> bool:
        """True when nobody wrote outside the tensor."""
        before = self.buffer[:GUARD_BYTES]
        after = self.buffer[GUARD_BYTES + self.bytes :]
        return bool((before == _GUARD).all()) and bool((after == _GUARD).all())
