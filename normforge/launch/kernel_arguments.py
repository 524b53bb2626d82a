"""The arguments of a kernel over rows, as they lie in memory. binding.py launches with them.

Both kernels of a call have one block of arguments: the main kernel's, then the second one's. Only
the addresses of tensors differ from call to call.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from math import gcd
from typing import Any, NamedTuple

from ..operations.signature import Signature
from ..spec import Launch, ceil_div
from .row_layout import RowLayout, division_factor, gap_factor

# scratch, the sums; rows of partial sums, columns, mode, and how many of the rows are sums of whole
# groups, which only a batch-invariant kernel takes.
SUM_ARGUMENTS = struct.Struct("@2Q4i")

DW_IN_WEIGHT_DTYPE, DW_IN_FP32, DW_ADDED = 0, 1, 2
"""The ways in which a kernel stores sums over rows: it rounds them to the weight's dtype, stores
them as fp32, or adds them to the fp32 numbers that are there."""


class Extent(NamedTuple):
    """The numbers of a call.

    strides: elements between rows, of every strided tensor of the signature. gaps: elements of a
    gap behind some rows, as between the heads of one token and the next in a packed tensor, of
    every tensor `in_heads`; gap_factor: see there, 0 where all rows lie at one stride. group: the
    launch's. numbers: those of the signature. of_groups: what `of_groups` returns, where groups of
    rows share something.
    """

    rows: int
    strides: tuple[int, ...]
    gaps: tuple[int, ...]
    gap_factor: int
    columns: int
    group: int
    dw_mode: int = DW_IN_WEIGHT_DTYPE
    weight_offset: float = 0.0
    numbers: tuple[float, ...] = ()
    of_groups: tuple[int, ...] = ()

    @property
    def values(self) -> tuple[Any, ...]:
        """Return the values in the order in which the kernel takes them, but for those that stand
        behind all addresses."""
        return (self.rows, *self.strides, *self.gaps, *self[3:8])


def extent_of(
    signature: Signature,
    rows: int,
    columns: int,
    layouts: Mapping[str, RowLayout],
    group: int,
    given: Mapping[str, Any] | None = None,
) -> Extent:
    """The numbers of a call whose tensors have these layouts, by name. All in heads have the same
    `inner`, or none; the rows of others without a layout lie one behind the other. given: what the
    call is given by name, of which the signature's numbers are taken, and what groups of rows
    share: as matrices, and in `heads` how many rows share a row of them. Raises ValueError as
    `of_groups` does."""
    dense = RowLayout(columns)
    strides = (layouts.get(tensor.name, dense).stride for tensor in signature.strided)
    heads = layouts.get(signature.early[0].name, dense).inner
    found = (layouts.get(tensor.name, dense) for tensor in signature.in_heads)
    packed = (at.in_steps_of(heads) or at for at in found)
    gaps = tuple(at.outer - heads * at.stride for at in packed)
    numbers = tuple(float((given or {})[tensor.name]) for tensor in signature.numbers)
    extent = (rows, tuple(strides), gaps, gap_factor(rows, heads), columns, group)
    shared: tuple[int, ...] = ()
    if signature.groups and given is not None:
        first = given[signature.groups[0].name]
        wide = first.element_size() == 4
        shared = of_groups(rows, int(given["heads"]), first.shape[0], wide, heads)
    return Extent(*extent, numbers=numbers, of_groups=shared)


def of_groups(
    rows: int, heads: int, groups: int, wide: bool, inner: int = 0
) -> tuple[int, int, int, int, int]:
    """Return how a kernel finds what `heads` consecutive rows share, in tensors of `groups` rows,
    which begin anew behind the last: the factors of two divisions, when they begin anew (0: never),
    whether the numbers are fp32, and of how many rows each run has neither the end of a group nor a
    gap in it. inner: rows between gaps, 0 for no gaps. Raises ValueError for more rows than it can
    number."""
    of_all = ceil_div(rows, heads)
    period = groups if groups < of_all else 0
    factor = division_factor(rows, heads)
    of_period = division_factor(of_all, period) if period else 0
    if not factor or (period and not of_period):
        raise ValueError(f"kernels cannot number {rows} rows, {heads} to each of {groups} groups")
    return factor, of_period, period, int(wide), gcd(heads, inner)


class ArgumentLayout:
    """The arguments of a signature as the compiler lays them out, every one naturally aligned.

    The main kernel's are one structure (templates/row_kernel.cu.j2): the addresses of the leading
    tensors; counters, zeroed words and scratch; rows, strides and gaps; columns, group, mode and
    offset; the addresses of the tensors behind; the numbers; those of groups. pack_addresses:
    writes the addresses of all leading tensors, in the order of the signature, 0 for None.
    behind_at: where the others stand. Offsets are in bytes.
    """

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        leading, behind = signature.leading, signature.behind
        strides, gaps = len(signature.strided), len(signature.in_heads)
        form = f"@{len(leading)}Q3Q{1 + strides + gaps}qI3if"
        first_behind = struct.calcsize(f"{form}0Q")
        self.behind_at = tuple(first_behind + 8 * i for i in range(len(behind)))
        form += f"{len(behind)}Q" if behind else ""
        numbers = enumerate(signature.numbers)
        self.numbers_at = {t.name: struct.calcsize(form) + 4 * i for i, t in numbers}
        form += f"{len(signature.numbers)}f" + "2qIiI" * bool(signature.groups)
        self.main = struct.Struct(f"{form}0Q")
        self.pack_addresses = struct.Struct(f"@{len(leading)}Q").pack_into
        size = self.main.size
        self.second_at = size
        self.size = size + SUM_ARGUMENTS.size
        self._names = [[tensor.name for tensor in some] for some in (leading, behind)]
        places = {name: 8 * i for i, name in enumerate(self._names[0])}
        self.places = places | {t.name: at for t, at in zip(behind, self.behind_at, strict=True)}
        self.workspace_at = tuple(8 * (len(leading) + i) for i in range(3))
        """The offsets of the addresses of counters, zeroed words and scratch."""
        self.scratch_at = (self.workspace_at[2], size)
        # Both kernels read the address of the sums from one place.
        self.parameters = ((0,), ())
        if signature.sums:
            second = (size, places[signature.sums.name], *range(size + 16, size + 32, 4))
            self.parameters = ((0,), second)

    def pack(self, block: Any, leading: Sequence[int], behind: Sequence[int] = ()) -> None:
        """Write the addresses of all tensors into a block, in the order of the signature."""
        self.pack_addresses(block, 0, *leading)
        for at, address in zip(self.behind_at, behind, strict=True):
            pack_address(block, at, address)

    def addresses(self, tensors: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        """Return the addresses that `pack` takes, of tensors by their names; 0 for one that is None
        or left out."""
        leading, behind = (
            [0 if one is None else one.data_ptr() for one in map(tensors.get, names)]
            for names in self._names
        )
        return leading, behind

    def block(self, launch: Launch, extent: Extent, zeros: int, scratch: int) -> Any:
        """A block with 0 for the addresses of all tensors. zeros, scratch: as in binding.bind."""
        signature = self.signature
        values = ctypes.create_string_buffer(self.size)
        workspace = (zeros, zeros + launch.zeroed_offset, scratch)
        leading, behind = [0] * len(signature.leading), [0] * len(signature.behind)
        numbers = (*extent.values, *behind, *extent.numbers, *extent.of_groups)
        self.main.pack_into(values, 0, *leading, *workspace, *numbers)
        columns = signature.column_sums * extent.columns
        second = (scratch, 0, launch.partials, columns, extent.dw_mode, extent.group)
        SUM_ARGUMENTS.pack_into(values, self.second_at, *second)
        return values


argument_layout = cache(ArgumentLayout)
"""The layout of a signature, made once."""
pack_address = struct.Struct("@Q").pack_into
"""Writes one address at an offset."""
