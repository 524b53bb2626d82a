"""The arguments of a backward's launch as the kernels take them; binding.py launches."""

from __future__ import annotations

import struct
from typing import NamedTuple

# The arguments as the compiler lays them out, every one naturally aligned. The main kernel's are
# one structure: x, dy, rstd, weight, dx, dw, dresidual, dresidual_out; counters, zeroed, scratch;
# Extent; mean, where a kernel that takes none does not look.
MAIN_ARGUMENTS = struct.Struct("@8Q3Q7qI3ifQ")
# scratch, dw; rows of partial dw, columns, dw mode, and how many rows are sums of whole groups,
# which only a batch-invariant kernel takes.
SUM_ARGUMENTS = struct.Struct("@2Q4i")

DW_IN_WEIGHT_DTYPE, DW_IN_FP32, DW_ADDED = 0, 1, 2
"""What a kernel does with dw: rounds it to the weight's dtype, stores it as fp32, or adds it to the
fp32 numbers that are there."""


class Extent(NamedTuple):
    """The numbers of a call in the order in which the kernel takes them.

    Strides are elements between rows. x_gap, dy_gap: elements of a gap behind some rows, as between
    the heads of one token and the next in a packed tensor; gaps: see `gap_factor`, 0 where all rows
    lie at one stride. group: the launch's.
    """

    rows: int
    x_stride: int
    dy_stride: int
    dresidual_stride: int
    dx_stride: int
    x_gap: int
    dy_gap: int
    gaps: int
    columns: int
    group: int
    dw_mode: int
    weight_offset: float


def gap_factor(rows: int, heads: int) -> int:
    """f for which f * row >> 32 is row // heads, for every row below `rows`; 0 where there is none,
    or no heads. (f * heads exceeds 2^32 by at most `heads`, so the product is off by less than
    rows * heads, which must stay below 2^32.)"""
    return (1 << 32) // heads + 1 if heads > 1 and rows * heads < 1 << 32 else 0
