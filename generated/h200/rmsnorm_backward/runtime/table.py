"""Which kernel serves a call: the table of a package and the rules for reading it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any

from .spec import KernelSpec, ceil_div

FORMAT = 3
"""Version of table.json: a package and its own runtime always agree on it."""
TABLE = "table.json"
ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of one element of each supported dtype."""
MAX_ALIGNMENT = 32
"""Bytes: the widest vector of any kernel, and so the most that an address needs to be known for."""


def read_cubin(package: Path, file: str, digest: str) -> bytes:
    """kernels/<file>.cubin, whose sha256 has to begin with `digest`. Raises RuntimeError."""
    path = package / "kernels" / f"{file}.cubin"
    try:
        cubin = path.read_bytes()
    except OSError as error:
        raise RuntimeError(f"cannot read {path} ({error.strerror}); emit it again") from error
    if hashlib.sha256(cubin).hexdigest()[:16] != digest:
        raise RuntimeError(f"{path} is not the kernel of the table; emit the package again")
    return cubin


@dataclass(frozen=True)
class Kernel:
    """A stored kernel: `file` is the stem of kernels/<file>.cu and .cubin, digest the first 16 hex
    digits of the cubin's sha256."""

    file: str
    digest: str
    spec: KernelSpec

    def read_cubin(self, package: Path) -> bytes:
        """The machine code. Raises RuntimeError when the file is missing or damaged."""
        return read_cubin(package, self.file, self.digest)


@dataclass(frozen=True)
class Tuned:
    """The winner of one problem, and what is known about it."""

    M: int
    N: int
    dtype: str
    weight_dtype: str
    evidence: str
    kernel: Kernel
    provenance: dict[str, Any]

    @property
    def shape(self) -> str:
        spec = self.kernel.spec
        return shape_name(
            *(self.M, self.N, self.dtype, self.weight_dtype), *(spec.offset, spec.residual)
        )


@dataclass(frozen=True)
class Choice:
    """What serves a call. how: `tuned`, `nearest`, `generic` or `none`; reason: one sentence.
    kernel is None for `none`; tuned is the table's entry for the first two."""

    how: str
    reason: str
    kernel: Kernel | None = None
    tuned: Tuned | None = None


@dataclass(frozen=True)
class Table:
    """The contents of table.json: target holds name, title, arch and sms."""

    target: dict[str, Any]
    tuned: tuple[Tuned, ...]
    generic: tuple[Kernel, ...]

    @classmethod
    def load(cls, package: Path) -> Table:
        """Read a package's table. Raises ValueError for a damaged one, OSError for none."""
        path = package / TABLE
        try:
            data = json.loads(path.read_text())
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']}, expected {FORMAT}")
            return cls(
                target=dict(data["target"]),
                tuned=tuple(
                    Tuned(**{**entry, "kernel": _kernel(entry["kernel"])})
                    for entry in data["tuned"]
                ),
                generic=tuple(_kernel(entry) for entry in data["generic"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error}); emit the package again") from error

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "target": self.target,
            "tuned": [{**vars(entry), "kernel": _plain(entry.kernel)} for entry in self.tuned],
            "generic": [_plain(kernel) for kernel in self.generic],
        }

    def choose(
        self,
        M: int,
        N: int,
        dtype: str,
        weight_dtype: str,
        *,
        offset: bool = False,
        residual: str = "",
        alignment: int = MAX_ALIGNMENT,
        weight_alignment: int = MAX_ALIGNMENT,
        residual_alignment: int = MAX_ALIGNMENT,
    ) -> Choice:
        """The kernel for M >= 1 rows of N columns.

        offset, residual: as in the KernelSpec; kernels with these options exist where they were
        tuned and nowhere else. alignment: the power of two, in bytes, that divides the addresses
        and row strides of x and dy; weight_alignment, residual_alignment: the same of the weight
        and of dresidual.

        Order: the tuned shape; the nearest tuned M at the same N and dtypes (`_distance`); the
        generic kernel with the widest vectors and the least capacity.
        A kernel that the alignment rules out is passed over. The answer depends on these arguments
        alone, so equal calls get equal bits.
        """
        shape = shape_name(M, N, dtype, weight_dtype, offset, residual)
        passed_over = []
        for entry in self._by_distance(M, N, dtype, weight_dtype, offset, residual):
            fault = misfit(entry.kernel.spec, N, alignment, weight_alignment, residual_alignment)
            if fault:
                passed_over.append(f"{entry.kernel.file} {fault}")
            elif entry.M == M:
                return Choice("tuned", f"{shape} was tuned", entry.kernel, entry)
            else:
                why = passed_over[0] if passed_over else f"{shape} was not tuned"
                reason = f"{why}; the nearest M that serves it is {entry.M}"
                return Choice("nearest", reason, entry.kernel, entry)
        why = passed_over[0] if passed_over else f"nothing like {shape} was tuned"
        for kernel in sorted(self.generic, key=lambda k: (-k.spec.vector_bytes, k.spec.N)):
            spec = kernel.spec
            if (spec.dtype, spec.weight_dtype) != (dtype, weight_dtype):
                continue
            if not spec.least <= N <= spec.N:
                continue
            if (spec.offset, spec.residual) != (offset, residual):
                continue
            if not misfit(spec, N, alignment, weight_alignment):
                reason = f"{why}; this kernel takes any N from {spec.least} to {spec.N}"
                return Choice("generic", reason, kernel)
        return Choice("none", f"{why}, and no generic kernel serves it")

    def _by_distance(
        self, M: int, N: int, dtype: str, weight_dtype: str, offset: bool, residual: str
    ) -> list[Tuned]:
        same = [
            entry
            for entry in self.tuned
            if (entry.N, entry.dtype, entry.weight_dtype) == (N, dtype, weight_dtype)
            and (entry.kernel.spec.offset, entry.kernel.spec.residual) == (offset, residual)
        ]
        return sorted(same, key=lambda entry: (_distance(entry, M), entry.M))

    def kernels(self) -> Iterator[Kernel]:
        """Every kernel, tuned ones first; one that serves several shapes repeats."""
        yield from (entry.kernel for entry in self.tuned)
        yield from self.generic


def _distance(entry: Tuned, M: int) -> float:
    """How far a tuned kernel is from M rows: by the ratio of the rows, and twice by how much more
    of its grid idles at M than where it was tuned. (A kernel may be best at its own M because all
    rows fit into one round of its grid, and take nearly twice as long for one row more.)"""
    spec = entry.kernel.spec
    more = _idle(spec, M) / _idle(spec, entry.M)
    return abs(log(entry.M / M)) + 2 * max(0.0, log(more))


def _idle(spec: KernelSpec, M: int) -> float:
    """Rows that the largest grid would work on in the time that it takes for M, by M."""
    at_once = spec.participants * spec.rows_per_cta * spec.rows_in_flight
    return ceil_div(M, at_once) * at_once / M


def shape_name(
    M: int, N: int, dtype: str, weight_dtype: str, offset: bool = False, residual: str = ""
) -> str:
    """`MxN:dtype[:weight dtype][+offset][+residual[_dtype]]`, the form in which the tuner names
    shapes."""
    name = f"{M}x{N}:{dtype}" + ("" if weight_dtype == dtype else f":{weight_dtype}")
    name += "+offset" if offset else ""
    if residual:
        name += "+residual" + ("" if residual == dtype else f"_{residual}")
    return name


def misfit(
    spec: KernelSpec,
    N: int,
    alignment: int,
    weight_alignment: int,
    residual_alignment: int = MAX_ALIGNMENT,
) -> str:
    """Why a kernel of the right width and dtypes cannot serve a call: the rest of a sentence that
    begins with the kernel, or "" when it can."""
    fault = misaligned(
        *(N, spec.dtype, spec.weight_dtype, spec.vector_bytes, alignment, weight_alignment)
    )
    if fault:
        return fault
    if spec.residual:
        # What holds for the weight holds for the residual's gradient, whose rows may be copied
        # whole besides.
        step = min(16, spec.vector_bytes // ITEMSIZE[spec.dtype] * ITEMSIZE[spec.residual])
        if residual_alignment % step:
            return f"needs rows of the residual's gradient at multiples of {step} bytes"
    return ""


def misaligned(
    N: int, dtype: str, weight_dtype: str, vector: int, alignment: int, weight_alignment: int
) -> str:
    """Why a kernel that reads rows in vectors of so many bytes cannot read them or the weight: the
    rest of a sentence as of `misfit`, or "" when it can."""
    itemsize = ITEMSIZE[dtype]
    if N * itemsize % vector or alignment % vector:
        return f"needs rows at multiples of {vector} bytes"
    # The weights beside one vector of x are loaded at most 16 bytes at a time.
    weights = min(16, vector // itemsize * ITEMSIZE[weight_dtype])
    if weight_alignment % weights:
        return f"needs a weight at a multiple of {weights} bytes"
    return ""


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """True when machine code for `arch` loads on a device of this compute capability. With an "a"
    it loads on exactly one, else also on later minor versions (CUDA programming guide, binary
    compatibility)."""
    match = re.fullmatch(r"sm_(\d+)(\d)(a?)", arch)
    if match is None:
        return False
    major, minor = int(match[1]), int(match[2])
    if match[3]:
        return capability == (major, minor)
    return capability[0] == major and capability[1] >= minor


def _kernel(data: dict[str, Any]) -> Kernel:
    return Kernel(data["file"], data["digest"], KernelSpec(**data["spec"]))


def _plain(kernel: Kernel) -> dict[str, Any]:
    return {"file": kernel.file, "digest": kernel.digest, "spec": kernel.spec.to_json()}
