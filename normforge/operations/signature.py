"""The signature of a kernel over rows: every tensor that it reads and writes, named once.

A signature lists tensors in the order in which the kernels take their addresses. The kernels'
arguments, what packs them on the host, allocation, the emulator's buffers and the checks of
accuracy and determinism follow from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from .tensor import RESERVED, ROLES, Tensor


@dataclass(frozen=True, init=False)
class Signature:
    """The tensors of an operation. row_sums: sums over a row that all of its outputs need, or 0.
    summed: whether each tensor of rows goes into a row sum, so that its values have arrived before
    the sum is known. later_sums: sums over a row whose terms need the row sums: none, or as many.
    Raises ValueError, in one sentence, for tensors that no row kernel can have."""

    tensors: tuple[Tensor, ...]
    row_sums: int = 1
    summed: bool = False
    later_sums: int = 0

    def __init__(
        self, *tensors: Tensor, row_sums: int = 1, summed: bool = False, later_sums: int = 0
    ) -> None:
        object.__setattr__(self, "tensors", tensors)
        object.__setattr__(self, "row_sums", row_sums)
        object.__setattr__(self, "summed", summed)
        object.__setattr__(self, "later_sums", later_sums)
        fault = next(self._faults(), None)
        if fault is not None:
            raise ValueError(fault)
        for name, kind in vars(Signature).items():  # what Dynamo cannot read for the first time
            if isinstance(kind, cached_property):
                getattr(self, name)

    def _faults(self) -> Iterator[str]:
        for tensor in self.tensors:
            if not isinstance(tensor, Tensor) or tensor.role not in ROLES:
                said = getattr(tensor, "role", tensor)
                yield f"{said!r} is no tensor of a signature: its role is one of {', '.join(ROLES)}"
                return
            if not re.fullmatch("[a-z][a-z0-9_]*", tensor.name) or RESERVED.fullmatch(tensor.name):
                yield f"a tensor cannot be called '{tensor.name}': kernels use that name themselves"
        names = self.names
        if twice := [name for name in names if names.count(name) > 1]:
            yield f"two tensors are called '{twice[0]}'"
        if not self.early:
            yield "a row kernel reads at least one tensor of rows: declare it with rows()"
        if not self.outputs:
            yield "a row kernel writes at least one tensor of rows: declare it with rows_out()"
        if self.row_sums not in (0, 1, 2, 3, 4):
            yield f"a row kernel has 0 to 4 row sums, got {self.row_sums!r}"
        if self.summed and not self.row_sums:
            yield "without row sums, no tensor of rows goes into one: leave out summed"
        if self.later_sums not in (0, self.row_sums):
            yield f"a row kernel has no later sums or {self.row_sums}, got {self.later_sums!r}"
        if self.sums and self.sums.count not in (1, 2):
            yield f"{self.sums.name} counts one or two sums of a column, got {self.sums.count!r}"
        for role in ("columns", "sums", "quantized", "scales"):
            if len(found := [t.name for t in self.tensors if t.role == role and not t.added]) > 1:
                yield f"a row kernel has one tensor of {role} at most, got {' and '.join(found)}"
        if len(self.all_columns) > 2 or (self.all_columns and self.columns is None):
            yield "a row kernel adds one tensor of columns at most, to what others are a factor of"
        if odd := [t.name for t in self.tensors if t.paired and t not in self._may_be_paired]:
            yield f"{odd[0]} cannot be read in pairs: rows that are read early and columns can"
        if len({"quantized", "scales"} & {t.role for t in self.tensors}) == 1:
            yield "what is quantized has scales, and these are of what is quantized: give both"
        if self.scales and (self.scales.kind not in ("fp32", "e8m0") or self.scales.block < 16):
            yield (
                f"{self.scales.name} are fp32 or e8m0, of blocks of at least 16 columns, got "
                f"{self.scales.kind} of {self.scales.block}"
            )
        if odd := [t.name for t in self.tensors if t.sum_of and not self._is_sum(t)]:
            yield f"{odd[0]} is the sum of two tensors of rows that are read early: name these"
        if len(self.late) > 1 or len(self.copies) > 1:
            yield "a row kernel adds one tensor of rows at most, and copies one output at most"

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(tensor.name for tensor in self.tensors)

    def __getitem__(self, name: str) -> Tensor:
        """Raises KeyError."""
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        raise KeyError(name)

    def with_tensor(self, tensor: Tensor, row_sums: int) -> Signature:
        """Return the signature with one more tensor, and with so many row sums."""
        return Signature(
            *(*self.tensors, tensor),
            row_sums=row_sums,
            summed=self.summed,
            later_sums=self.later_sums,
        )

    def counting(self, **counts: int) -> Signature:
        """Return the signature with other counts of sums for every column."""
        changed = (
            replace(tensor, count=counts.get(tensor.name, tensor.count)) for tensor in self.tensors
        )
        return Signature(
            *changed, row_sums=self.row_sums, summed=self.summed, later_sums=self.later_sums
        )

    @cached_property
    def leading(self) -> tuple[Tensor, ...]:
        """The tensors whose addresses the arguments begin with."""
        return tuple(t for t in self.tensors if not t.behind and t.role not in ("number", "flag"))

    @cached_property
    def behind(self) -> tuple[Tensor, ...]:
        """The tensors whose addresses stand behind all other arguments but the numbers."""
        return tuple(tensor for tensor in self.tensors if tensor.behind)

    @cached_property
    def numbers(self) -> tuple[Tensor, ...]:
        """The numbers that a call is given by value, which the arguments end with."""
        return tuple(tensor for tensor in self.tensors if tensor.role == "number")

    @cached_property
    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in self.tensors if not tensor.output)

    @cached_property
    def early(self) -> tuple[Tensor, ...]:
        """Rows that are read before the row sums."""
        return tuple(t for t in self.tensors if t.role == "rows" and not t.output and not t.late)

    @cached_property
    def paired(self) -> tuple[Tensor, ...]:
        """Rows that are read early and in pairs of columns."""
        return tuple(tensor for tensor in self.early if tensor.paired)

    @property
    def _may_be_paired(self) -> tuple[Tensor, ...]:
        return self.early if self.columns is None else (*self.early, self.columns)

    @cached_property
    def groups(self) -> tuple[Tensor, ...]:
        """The numbers that the rows of a group share."""
        return tuple(tensor for tensor in self.tensors if tensor.role == "group")

    @cached_property
    def pairs(self) -> bool:
        """True where kernels have to know of pairs of columns."""
        return bool(self.groups) or any(tensor.paired for tensor in self.tensors)

    @cached_property
    def late(self) -> tuple[Tensor, ...]:
        """Rows that are added to the first output."""
        return tuple(tensor for tensor in self.tensors if tensor.late)

    @cached_property
    def statistics(self) -> tuple[Tensor, ...]:
        """The numbers of each row that are read, those behind all other arguments first."""
        found = [tensor for tensor in self.tensors if tensor.role == "row" and not tensor.output]
        return tuple(sorted(found, key=lambda tensor: not tensor.behind))

    @cached_property
    def row_outputs(self) -> tuple[Tensor, ...]:
        """The numbers of each row that are written."""
        return tuple(tensor for tensor in self.tensors if tensor.role == "row" and tensor.output)

    @cached_property
    def columns(self) -> Tensor | None:
        """The columns that a call's offset is added to: ones where it does without them."""
        return next((tensor for tensor in self.all_columns if not tensor.added), None)

    @cached_property
    def added_columns(self) -> Tensor | None:
        """The columns that are added: zeros where a call does without them."""
        return next((tensor for tensor in self.all_columns if tensor.added), None)

    @cached_property
    def all_columns(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.role == "columns")

    @cached_property
    def outputs(self) -> tuple[Tensor, ...]:
        """Rows that are written, but for copies."""
        return tuple(t for t in self.tensors if t.role == "rows" and t.output and not t.copy_of)

    @cached_property
    def in_heads(self) -> tuple[Tensor, ...]:
        """The tensors whose rows may lie as the heads of packed ones: those read early, and outputs
        that say so."""
        return (*self.early, *(tensor for tensor in self.outputs if tensor.packed))

    @cached_property
    def copies(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.copy_of)

    @cached_property
    def stream(self) -> Tensor | None:
        """The output that is a sum of inputs, which the terms are of."""
        return next((tensor for tensor in self.tensors if tensor.sum_of), None)

    def _is_sum(self, tensor: Tensor) -> bool:
        early = [one.name for one in self.early]
        return len(set(tensor.sum_of)) == 2 and set(tensor.sum_of) <= {*early}

    @cached_property
    def of_terms(self) -> tuple[str, ...]:
        """The names of what an operation's terms take: the inputs, but those that are added to the
        first output, and a sum of inputs in the place of these."""
        stream = self.stream
        summed = () if stream is None else stream.sum_of
        needed = [t.name for t in self.inputs if not t.late and t.name not in summed]
        return (*needed, *(() if stream is None else (stream.name,)))

    @cached_property
    def sums(self) -> Tensor | None:
        return next((tensor for tensor in self.tensors if tensor.role == "sums"), None)

    @cached_property
    def quantized(self) -> Tensor | None:
        return next((tensor for tensor in self.tensors if tensor.role == "quantized"), None)

    @cached_property
    def scales(self) -> Tensor | None:
        return next((tensor for tensor in self.tensors if tensor.role == "scales"), None)

    @property
    def column_sums(self) -> int:
        """Sums over the rows, of every column."""
        return self.sums.count if self.sums else 0

    @cached_property
    def strided(self) -> tuple[Tensor, ...]:
        """The tensors whose row stride is an argument: rows read early, those added, outputs but
        for copies, which lie as what they are copies of, and what groups share."""
        return (*self.early, *self.late, *self.outputs, *self.groups)
