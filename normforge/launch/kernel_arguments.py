"""The arguments of a backward's kernels, as they lie in memory. binding.py launches with them.

Both kernels of a call have one block of arguments: the main kernel's, then the second one's. Only
the addresses of tensors differ from call to call.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any, NamedTuple

from ..spec import Launch

# The arguments as the compiler lays them out, every one naturally aligned. The main kernel's are
# one structure: x, dy, rstd, weight, dx, dw, dresidual, dresidual_out; counters, zeroed, scratch;
# Extent; mean, where a kernel that takes none does not look.
MAIN_ARGUMENTS = struct.Struct("@8Q3Q7qI3ifQ")
# scratch, dw; rows of partial dw, columns, dw mode, and how many rows are sums of whole groups,
# which only a batch-invariant kernel takes.
SUM_ARGUMENTS = struct.Struct("@2Q4i")

pack_addresses = struct.Struct("@8Q").pack_into
"""Writes x, dy, rstd, weight, dx, dw, dresidual and dresidual_out (0 for None), which the main
kernel's arguments begin with."""
pack_mean = struct.Struct("@Q").pack_into
"""Writes mean at MEAN."""
MEAN = MAIN_ARGUMENTS.size - 8
_SUM = MAIN_ARGUMENTS.size
_DW = 5 * 8  # which both kernels read from one place
MAIN_AT, SUM_AT = (0,), (_SUM, _DW, *range(_SUM + 16, _SUM + 32, 4))
"""Where the parameters of either kernel begin in a block. In bytes, as all of these."""
SCRATCH_AT = (10 * 8, _SUM)
"""Where the address of the scratch stands."""

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


def argument_block(launch: Launch, extent: Extent, zeros: int, scratch: int) -> Any:
    """A block with 0 for the addresses of all tensors. zeros, scratch: as in binding.bind."""
    values = ctypes.create_string_buffer(_SUM + SUM_ARGUMENTS.size)
    MAIN_ARGUMENTS.pack_into(
        values, 0, *([0] * 8), zeros, zeros + launch.zeroed_offset, scratch, *extent, 0
    )
    SUM_ARGUMENTS.pack_into(
        values,
        _SUM,
        *(scratch, 0, launch.partials, extent.columns, extent.dw_mode, extent.group),
    )
    return values
