"""The two tables of a package, and the rules by which they say which kernel serves a call.

table.json is about the backward and forward.json about the forward; both have the same format.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from math import log
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from .cubins import AGAIN, read_cubin
from .older_tables import FORMAT_BEFORE, todays_spec
from .shape_names import shape_name
from .spec import ITEMSIZE, ForwardSpec, KernelSpec

FORMAT = 5
"""Version of both tables. The one before is read, too."""
TABLE = "table.json"
FORWARD_TABLE = "forward.json"
MANY_TIMES = 4
"""A kernel that was tuned for so many times the rows of a call is far from it."""
_TARGET_FACTS = {"name", "title", "arch", "sms"}
_DIGEST = re.compile(r'\A\{\n "digest": "[0-9a-f]{16}",\n')
MAX_ALIGNMENT = 32
"""Bytes: the widest vector of any kernel, and so the most that an address needs to be known for."""

S = TypeVar("S", KernelSpec, ForwardSpec)


@dataclass(frozen=True)
class KernelOf(Generic[S]):
    """A stored kernel.

    file: its name among the cubins, and of kernels/<file>.cu, which tuned backward kernels have and
    one forward kernel of each form. digest: the first 16 hex digits of the cubin's sha256. nvrtc:
    version of the compiler. config: what it was rendered from, beside the spec.
    """

    file: str
    digest: str
    spec: S
    nvrtc: str = ""
    config: dict[str, Any] = field(default_factory=dict, compare=False)

    def read_cubin(self, package: Path) -> bytes:
        """The machine code. Raises RuntimeError when it is missing or damaged."""
        return read_cubin(package, self.file, self.digest)


@dataclass(frozen=True)
class TunedOf(Generic[S]):
    """The winner of one problem, and what is known about it. evidence: `measured` or `predicted`;
    provenance: how it was chosen."""

    M: int
    N: int
    dtype: str
    weight_dtype: str
    evidence: str
    kernel: KernelOf[S]
    provenance: dict[str, Any]

    @property
    def shape(self) -> str:
        spec = self.kernel.spec
        options = (spec.offset, spec.residual, spec.rotation)
        return shape_name(self.M, self.N, self.dtype, self.weight_dtype, *options)


@dataclass(frozen=True)
class ChoiceOf(Generic[S]):
    """The choice for a call. how: `tuned`, `nearest`, `fallback` or `none`; reason: one sentence.
    kernel is None for `none`; tuned is the table's entry for the first two."""

    how: str
    reason: str
    kernel: KernelOf[S] | None = None
    tuned: TunedOf[S] | None = None


@dataclass(frozen=True)
class TableOf(Generic[S]):
    """The contents of a table. target: name, title, arch and sms; fallback: the kernels for what
    was not tuned."""

    few_rows: ClassVar[int] = 0
    """A kernel that was tuned for many times as many rows serves so few only in want of another."""
    target: dict[str, Any]
    tuned: tuple[TunedOf[S], ...] = ()
    fallback: tuple[KernelOf[S], ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "target": self.target,
            "tuned": [{**vars(entry), "kernel": _plain(entry.kernel)} for entry in self.tuned],
            "fallback": [_plain(kernel) for kernel in self.fallback],
        }

    def kernels(self) -> Iterator[KernelOf[S]]:
        """Every kernel, tuned ones first; one that serves several shapes repeats."""
        yield from (entry.kernel for entry in self.tuned)
        yield from self.fallback

    def choose(
        self,
        M: int,
        N: int,
        dtype: str,
        weight_dtype: str,
        alignment: int = MAX_ALIGNMENT,
        weight_alignment: int = MAX_ALIGNMENT,
        *,
        offset: bool = False,
        residual: str = "",
        rotation: str = "",
        first_alignment: int | None = None,
    ) -> ChoiceOf[S]:
        """The kernel for M >= 1 rows of N columns.

        alignment: the power of two, in bytes, that divides the addresses and row strides of x and
        dy (of a forward: of x and the residual); weight_alignment: the same of the weight. (A
        dresidual is at MAX_ALIGNMENT.) offset, residual, rotation: as in the KernelSpec; kernels
        with these options exist where they were tuned and nowhere else. first_alignment: that of
        the addresses alone where all rows lie one behind the other, else 1; by default `alignment`.

        Order: the tuned shape; the nearest tuned M at the same N and dtypes (`_distance`), unless
        M is at most `few_rows` and that is MANY_TIMES M; the fallback kernel with the widest
        vectors and the least capacity; that nearest M after all. A kernel that the alignment rules
        out is passed over. The answer depends on these arguments alone: equal calls, equal bits.
        """
        options = (offset, residual, rotation)
        shape = shape_name(M, N, dtype, weight_dtype, *options)
        first = alignment if first_alignment is None else first_alignment
        passed_over: list[str] = []
        same = [
            entry
            for entry in self.tuned
            if (entry.N, entry.dtype, entry.weight_dtype) == (N, dtype, weight_dtype)
            and _options(entry.kernel.spec) == options
        ]
        nearest: ChoiceOf[S] | None = None
        for entry in sorted(same, key=lambda entry: (_distance(entry, M), entry.M)):
            if fault := misfit(entry.kernel.spec, N, alignment, weight_alignment, first):
                passed_over.append(f"{entry.kernel.file} {fault}")
                continue
            if entry.M == M:
                return ChoiceOf("tuned", f"{shape} was tuned", entry.kernel, entry)
            why = passed_over[0] if passed_over else f"{shape} was not tuned"
            reason = f"{why}; the nearest M that serves it is {entry.M}"
            nearest = ChoiceOf("nearest", reason, entry.kernel, entry)
            if self.few_rows < M or entry.M < MANY_TIMES * M:
                return nearest
            passed_over.append(f"{shape} was not tuned, and the nearest M, {entry.M}, is far")
            break
        why = passed_over[0] if passed_over else f"nothing like {shape} was tuned"
        for kernel in sorted(self.fallback, key=lambda k: (-k.spec.vector_bytes, k.spec.N)):
            spec = kernel.spec
            kind = (spec.dtype, spec.weight_dtype, _options(spec))
            if kind != (dtype, weight_dtype, options) or not spec.least <= N <= spec.N:
                continue
            if not misfit(spec, N, alignment, weight_alignment):
                reason = f"{why}; this kernel takes any N from {spec.least} to {spec.N}"
                return ChoiceOf("fallback", reason, kernel)
        return nearest or ChoiceOf("none", f"{why}, and no fallback kernel serves it")


Kernel = KernelOf[KernelSpec]
Tuned = TunedOf[KernelSpec]
Choice = ChoiceOf[KernelSpec]
ForwardKernel = KernelOf[ForwardSpec]
ForwardTuned = TunedOf[ForwardSpec]
ForwardChoice = ChoiceOf[ForwardSpec]


class Table(TableOf[KernelSpec]):
    """The backward's table. At 64 rows, its kernels for many rows took up to 3 times as long as
    fallback kernels, at 256 neither is faster (benchmarks/results/few_rows_h200.json.xz)."""

    few_rows: ClassVar[int] = 128

    @classmethod
    def load(cls, package: Path) -> Table:
        """Read a package's table. Raises ValueError for a damaged or old one, OSError for none."""
        return cls(*_read(package / TABLE, KernelSpec))


class ForwardTable(TableOf[ForwardSpec]):
    """The forward's table."""

    @classmethod
    def load(cls, package: Path) -> ForwardTable | None:
        """Read a package's table, None for a package without forward kernels. Raises ValueError for
        a damaged or old one."""
        try:
            return cls(*_read(package / FORWARD_TABLE, ForwardSpec))
        except FileNotFoundError:
            return None


def _read(
    path: Path, spec_of: type[S]
) -> tuple[dict[str, Any], tuple[TunedOf[S], ...], tuple[KernelOf[S], ...]]:
    """Target, tuned and fallback kernels of a table. Raises ValueError, OSError."""
    names = {known.name for known in fields(spec_of)}
    # Newer than some tables:
    newer = names & {"operation", "run_rows", "group_rows", "leaves", "producer", "rotation"}
    old = False

    def kernel(data: dict[str, Any]) -> KernelOf[S]:
        # This does what the constructor does, which takes 2 ms for a few hundred frozen objects.
        said = todays_spec(data["spec"]) if old and spec_of is KernelSpec else data["spec"]
        if said.keys() | newer != names:
            raise ValueError(f"the spec of {data['file']} has other fields")
        spec = object.__new__(spec_of)
        vars(spec).update(said)
        return KernelOf(**{**data, "spec": spec})

    try:
        text = path.read_bytes().decode()  # unlike read_text, this keeps the ends of lines
        data = json.loads(text)
        old = data["format"] == FORMAT_BEFORE
        if old or data["format"] == FORMAT:
            if "digest" in data and text != seal(_DIGEST.sub("{\n", text)):
                raise ValueError("its digest is not that of what it says")
            if data["target"].keys() != _TARGET_FACTS:
                raise ValueError("its target has other fields")
            return (
                dict(data["target"]),
                tuple(TunedOf(**{**e, "kernel": kernel(e["kernel"])}) for e in data["tuned"]),
                tuple(map(kernel, data["fallback"])),
            )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); {AGAIN}") from error
    raise ValueError(f"{path} has format {data['format']}, and its runtime reads {FORMAT}; {AGAIN}")


def seal(text: str) -> str:
    """A table as generator/package/files.py lays it out, with the digest of the rest of it."""
    rest = text.removeprefix("{\n")
    digest = hashlib.sha256(rest.encode()).hexdigest()[:16]
    return f'{{\n "digest": "{digest}",\n{rest}'


def _plain(kernel: KernelOf[S]) -> dict[str, Any]:
    return {**vars(kernel), "spec": asdict(kernel.spec)}


def _distance(entry: TunedOf[S], M: int) -> float:
    """Return a tuned kernel's distance from M rows: by the ratio of the rows, and twice by how much
    more of its grid idles at M than where it was tuned. (A kernel may be best at its own M because
    all rows fit into one round of its grid, and take nearly twice as long for one row more.)"""
    spec = entry.kernel.spec
    more = spec.idle(M) / spec.idle(entry.M)
    return abs(log(entry.M / M)) + 2 * max(0.0, log(more))


def _options(spec: KernelSpec | ForwardSpec) -> tuple[bool, str, str]:
    return spec.offset, spec.residual, spec.rotation


def misfit(
    spec: KernelSpec | ForwardSpec, N: int, alignment: int, weight_alignment: int, first: int = 1
) -> str:
    """Return why a kernel of the right width and dtypes cannot serve a call: the rest of a sentence
    that begins with the kernel, or "" when it can. Alignments, first: as in `choose`."""
    itemsize, vector = ITEMSIZE[spec.dtype], spec.vector_bytes
    if isinstance(spec, KernelSpec) and spec.row_period > 1:  # it loads weights one by one
        fault = f"needs rows one behind the other, the first at a multiple of {vector} bytes"
        return fault if N != spec.N or first % vector else ""
    if N * itemsize % vector or alignment % vector:
        return f"needs rows at multiples of {vector} bytes"
    # The weights beside one vector of x are loaded at most 16 bytes at a time.
    weights = min(16, vector // itemsize * ITEMSIZE[spec.weight_dtype])
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
