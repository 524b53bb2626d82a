"""Finds where the rows of a tensor are, and makes copies whose rows a kernel can read."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch

from ..table import MAX_ALIGNMENT


def gap_factor(rows: int, heads: int) -> int:
    """Return f for which f * row >> 32 is row // heads, for every row below `rows`; 0 where there
    is none, or no heads. (f * heads exceeds 2^32 by at most `heads`, so the product is off by less
    than rows * heads, which must stay below 2^32.)"""
    return (1 << 32) // heads + 1 if heads > 1 and rows * heads < 1 << 32 else 0


def division_factor(numbers: int, divisor: int) -> int:
    """Return f for which f * n >> 32 is n // divisor, for every n below `numbers`; 0 where there is
    none. (f * divisor exceeds 2^32 by `rest`, so the product is off by n * rest / 2^32 / divisor,
    which must stay below 1 / divisor.)"""
    factor = -(-(1 << 32) // divisor)
    rest = factor * divisor - (1 << 32)
    return factor if max(1, rest) * numbers <= 1 << 32 else 0


class RowLayout(NamedTuple):
    """The layout of a tensor's rows: they are `stride` elements apart, or `inner` of them are and
    then comes a step of `outer` elements (the heads of a packed tensor). inner is 0 for one
    stride."""

    stride: int
    inner: int = 0
    outer: int = 0

    def in_steps_of(self, inner: int) -> RowLayout | None:
        """Return the layout of the same rows with another `inner`; None where that is another order
        of rows."""
        if inner == self.inner or inner == 0:
            return self if inner == self.inner else None
        return None if self.inner else RowLayout(self.stride, inner, inner * self.stride)


def row_layout(tensor: torch.Tensor) -> RowLayout | None:
    """Return the layout of the rows of (..., N), when each is contiguous in itself and two strides
    describe them; None when that takes a copy. Stride 0 is one row repeated by `expand`."""
    N = tensor.shape[-1]
    if N > 1 and tensor.stride(-1) != 1:
        return None
    groups: list[tuple[int, int]] = []  # size and stride, outermost first
    for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        if size == 1:
            continue
        if groups and groups[-1][1] == stride * size:
            groups[-1] = (groups[-1][0] * size, stride)
        else:
            groups.append((size, stride))
    if not groups:
        return RowLayout(N)
    if len(groups) == 1:
        return RowLayout(groups[0][1])
    if len(groups) == 2 and gap_factor(prod(size for size, _ in groups), groups[1][0]):
        (_, outer), (inner, stride) = groups
        return RowLayout(stride, inner, outer)
    return None


def alignment_of(number: int) -> int:
    """The largest power of two that divides an address or a number of bytes, up to
    MAX_ALIGNMENT."""
    return (number | MAX_ALIGNMENT) & -(number | MAX_ALIGNMENT)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose rows kernels can read, at an aligned address: of one row where all are the same
    one, else of all."""
    tensor = tensor.detach()
    if tensor.dim() > 1 and not any(
        stride for size, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False) if size > 1
    ):
        return _aligned(tensor[(0,) * (tensor.dim() - 1)]).expand(tensor.shape)
    return _aligned(tensor)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    made = tensor.contiguous()
    return made.clone() if made.data_ptr() % MAX_ALIGNMENT else made
