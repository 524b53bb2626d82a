"""The request to a host program, in the form in which host/main.cpp reads it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from normforge.launch.row_layout import RowLayout
from normforge.operations.tensor import Tensor
from normforge.spec import ForwardSpec, KernelSpec
from normforge.table import ITEMSIZE

WRITTEN = {"quantized": "rows_out", "scales": "row_out", "sums": "sums"}
WRITTEN |= {role: f"{role}_out" for role in ("rows", "row")}
"""The roles of buffers that are written, by those of tensors."""


@dataclass(frozen=True)
class Buffer:
    """One tensor of a launch, in memory of its own.

    role: rows, row or columns for one that is read; rows_out, row_out or sums for one that is
    written. shape: (rows, columns), or (numbers,). content: what it holds before the launch; None
    for an output that is not added to. rows_at: where its rows lie; None for one behind the other.
    misaligned_bytes: from a 4096-byte boundary to its first element. over: name of the input in
    whose memory it lies instead, which has the same strides.
    """

    name: str
    role: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    content: torch.Tensor | None = None
    rows_at: RowLayout | None = None
    misaligned_bytes: int = 0
    over: str = ""

    @property
    def output(self) -> bool:
        return self.role in ("rows_out", "row_out", "sums")

    @property
    def line(self) -> str:
        """Return the line of the request that describes the buffer."""
        rows, columns = self.shape if len(self.shape) == 2 else (1, *self.shape)
        at = self.rows_at or RowLayout(columns)
        gap = at.outer // at.stride - at.inner  # in rows
        place = f"{at.stride} {at.inner} {gap} {self.misaligned_bytes} {self.over or '-'}"
        given = int(self.content is not None)
        size = f"{self.dtype.itemsize} {rows} {columns}"
        return f"buffer {self.name} {self.role} {size} {place} {given}"


@dataclass(frozen=True)
class Request:
    """One launch. It may have fields of `Launch` in host/machine.h, and has the tensors that the
    call has.

    arguments: the block of arguments of its kernels. addresses: where in it an address stands, and
    of which buffer, or of counters, zeroed or scratch; all others are 0 there. second: where the
    parameters of the second kernel begin.
    """

    fields: dict[str, int]
    buffers: Sequence[Buffer]
    arguments: bytes
    addresses: Sequence[tuple[int, str]]
    second: Sequence[int] = ()

    def encode(self, schedules: Iterable[tuple[int, int]]) -> bytes:
        """The bytes for the program. schedules: seed and residency of each."""
        lines = [f"{name} {value}" for name, value in self.fields.items()]
        lines += [buffer.line for buffer in self.buffers]
        names = {buffer.name for buffer in self.buffers} | {"counters", "zeroed", "scratch"}
        lines += [f"address {at} {name}" for at, name in self.addresses if name in names]
        lines += [f"second {at}" for at in self.second]
        lines += [f"run {seed} {residency}" for seed, residency in schedules]
        lines += [f"arguments {len(self.arguments)}\n"]
        given = [_bytes(b.content) for b in self.buffers if b.content is not None]
        return b"".join(("\n".join(lines).encode(), self.arguments, *given))

    @property
    def outputs(self) -> dict[str, Buffer]:
        """The buffers that the kernels write, in the order in which the program returns them."""
        return {buffer.name: buffer for buffer in self.buffers if buffer.output}


def fields_of(spec: KernelSpec | ForwardSpec) -> dict[str, int]:
    """Return the fields of a request that every kernel over rows needs."""
    item, weight_item = ITEMSIZE[spec.dtype], ITEMSIZE[spec.weight_dtype]
    weight_bytes = max(1, spec.vector_bytes // item) * weight_item
    producer = int(isinstance(spec, KernelSpec) and spec.producer)
    return {
        "threads": spec.threads,
        "cluster": spec.cluster,
        "shared_bytes": spec.smem_bytes,
        "team_threads": (spec.threads - 32 * producer) // spec.rows_per_cta,
        "producer": producer,
        "across_rows": int(isinstance(spec, KernelSpec) and spec.row_period > 1),
        # Neighbouring threads may own neighbouring halves of a word of shared memory.
        "granule": min(4, spec.vector_bytes, weight_bytes),
    }


def dtype_of(tensor: Tensor, spec: KernelSpec, wide_sums: bool) -> str:
    """Return a tensor's dtype; "" for one of an option that the kernel does not have. wide_sums:
    whether sums over the rows are fp32."""
    if tensor.option or tensor.kind:
        return tensor.kind or str(getattr(spec, tensor.option))
    if tensor.role == "rows":
        return spec.dtype
    in_fp32 = tensor.role == "row" or (tensor.role == "sums" and wide_sums)
    return "fp32" if in_fp32 else spec.weight_dtype


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
