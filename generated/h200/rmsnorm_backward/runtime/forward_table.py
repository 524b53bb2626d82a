"""Which forward kernel serves a call: the forward table of a package, and how to read it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import log
from pathlib import Path
from typing import Any, NamedTuple

from .table import misaligned, read_cubin

FORWARD_TABLE = "forward.json"
FORMAT = 1
"""Version of forward.json."""
KERNELS = ("rmsnorm_forward", "rmsnorm_forward_residual")
"""The `extern "C"` names in every forward cubin: without and with a residual."""


@dataclass(frozen=True)
class ForwardSpec:
    """The facts of one compiled forward that its launches need.

    N: row length, or with exact False the longest one served. threads: of one CTA. rows_per_cta:
    rows that a CTA works on at once, each by threads of its own; rows_in_flight: consecutive rows
    that those threads work on together. vector_bytes: alignment that pointers and row strides need.
    ctas_per_sm: CTAs for each of `sms` multiprocessors, which then walk over the rows; 0 for as
    many CTAs as the rows need.
    """

    name: str
    N: int
    exact: bool
    dtype: str
    weight_dtype: str
    threads: int
    smem_bytes: int
    vector_bytes: int
    rows_per_cta: int
    rows_in_flight: int
    cluster: int
    ctas_per_sm: int
    sms: int

    def grid(self, M: int) -> int:
        """CTAs of a launch for M >= 1 rows."""
        needed = -(-M // (self.rows_per_cta * self.rows_in_flight))
        if self.ctas_per_sm:
            needed = min(needed, max(1, self.sms * self.ctas_per_sm // self.cluster))
        return needed * self.cluster

    def misfit(self, N: int, alignment: int, weight_alignment: int) -> str:
        """Why rows of N columns cannot be served: the rest of a sentence that begins with the
        kernel, or "" when they can. alignments: powers of two, as in `ForwardTable.choose`."""
        if N > self.N or (self.exact and N != self.N):
            return f"is for {'' if self.exact else 'up to '}{self.N} columns"
        return misaligned(
            *(N, self.dtype, self.weight_dtype, self.vector_bytes, alignment, weight_alignment)
        )


@dataclass(frozen=True)
class ForwardKernel:
    """A stored kernel: the stem of kernels/<file>.cu and .cubin, the first 16 hex digits of the
    cubin's sha256, and its facts."""

    file: str
    digest: str
    spec: ForwardSpec

    def read_cubin(self, package: Path) -> bytes:
        """The machine code. Raises RuntimeError when the file is missing or damaged."""
        return read_cubin(package, self.file, self.digest)


@dataclass(frozen=True)
class ForwardTuned:
    """The kernel chosen for M rows of N columns. evidence: `measured` or `predicted`; provenance:
    how it was chosen."""

    M: int
    N: int
    dtype: str
    weight_dtype: str
    evidence: str
    kernel: ForwardKernel
    provenance: dict[str, Any]


class ForwardChoice(NamedTuple):
    """What serves a call. how: `tuned`, `nearest`, `generic` or `none`, and then kernel is None;
    tuned: the table's entry for the first two."""

    how: str
    kernel: ForwardKernel | None = None
    tuned: ForwardTuned | None = None


@dataclass(frozen=True)
class ForwardTable:
    """The contents of forward.json. target: name, title, arch and sms."""

    target: dict[str, Any]
    tuned: tuple[ForwardTuned, ...] = ()
    generic: tuple[ForwardKernel, ...] = ()

    @classmethod
    def load(cls, package: Path) -> ForwardTable | None:
        """A package's table, None for one without forward kernels. Raises ValueError for a damaged
        table."""
        path = package / FORWARD_TABLE
        try:
            data = json.loads(path.read_text())
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']}, expected {FORMAT}")
            tuned = (ForwardTuned(**{**e, "kernel": _kernel(e["kernel"])}) for e in data["tuned"])
            generic = (_kernel(entry) for entry in data["generic"])
            return cls(dict(data["target"]), tuple(tuned), tuple(generic))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error}); emit the package again") from error

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "target": self.target,
            "tuned": [asdict(entry) for entry in self.tuned],
            "generic": [asdict(kernel) for kernel in self.generic],
        }

    def choose(
        self, M: int, N: int, dtype: str, weight_dtype: str, alignment: int, weight_alignment: int
    ) -> ForwardChoice:
        """The kernel for M >= 1 rows of N columns.

        alignment: the power of two, in bytes, that divides the addresses and row strides of x and
        the residual; weight_alignment: the weight's. Order: the tuned shape; the tuned M nearest by
        ratio at the same N and dtypes; the generic kernel with the widest vectors and the least
        capacity. The answer depends on these arguments alone, so equal calls get equal bits.
        """
        dtypes = (dtype, weight_dtype)
        same = [e for e in self.tuned if (e.N, e.dtype, e.weight_dtype) == (N, *dtypes)]
        for entry in sorted(same, key=lambda e: (abs(log(e.M / M)), e.M)):
            if not entry.kernel.spec.misfit(N, alignment, weight_alignment):
                return ForwardChoice("tuned" if entry.M == M else "nearest", entry.kernel, entry)
        for kernel in sorted(self.generic, key=lambda k: (-k.spec.vector_bytes, k.spec.N)):
            spec = kernel.spec
            fits = not spec.misfit(N, alignment, weight_alignment)
            if fits and (spec.dtype, spec.weight_dtype) == dtypes:
                return ForwardChoice("generic", kernel)
        return ForwardChoice("none")

    def kernels(self) -> Iterator[ForwardKernel]:
        """Every kernel, tuned ones first; one that serves several shapes repeats."""
        yield from (entry.kernel for entry in self.tuned)
        yield from self.generic


def _kernel(data: dict[str, Any]) -> ForwardKernel:
    return ForwardKernel(data["file"], data["digest"], ForwardSpec(**data["spec"]))
