"""The forward's kernels: one variant, its geometry and its source."""

from __future__ import annotations

import hashlib
from dataclasses import astuple, dataclass, fields, replace
from functools import cached_property
from typing import Any

from generator.kernels.geometry import Config
from generator.kernels.knobs import FORWARD_KNOBS
from generator.kernels.nvrtc import Compiled
from generator.problem import ITEMSIZE, Problem
from generator.target import WARP
from normforge.spec import ForwardSpec, ceil_div, round_up

VECTORS_READ_TWICE = 4
"""Vectors that a thread has under way where rows are read twice."""
ANY_COLUMNS = 1 << 30
TILE_FORMS = ("tiles_in_turn", "tiles_in_pairs")
"""Forms with the arithmetic of vLLM's Triton kernel. They differ in how a thread adds."""
TILE_THREADS = 128
_TILE_COLUMNS_OF_THREAD = 8


@dataclass(frozen=True)
class ForwardVariant:
    """One forward kernel. form: `registers`, where a row stays in registers, or `twice`, where it
    is read again and may have any length, or one of TILE_FORMS, the same with sums as in Triton.
    ctas_per_sm: CTAs that walk over the rows and load the next ones ahead; 0 for as many CTAs as
    the rows need. exact: for N alone, else for any N up to it."""

    N: int
    dtype: str
    weight_dtype: str
    form: str
    threads_per_row: int
    rows_per_cta: int
    rows_in_flight: int
    vector_bytes: int
    cluster: int = 1
    ctas_per_sm: int = 0
    exact: bool = True

    def __str__(self) -> str:
        return self.id

    @property
    def config(self) -> dict[str, int | str]:
        """Its knobs, in the order of the search space."""
        return {knob: getattr(self, knob) for knob in FORWARD_KNOBS}

    @property
    def determinism(self) -> str:
        return "gpu_to_gpu"

    @property
    def threads(self) -> int:
        """Threads of one CTA."""
        return self.threads_per_row * self.rows_per_cta

    def takes(self, problem: Problem) -> bool:
        """Tell whether it serves a problem's rows, with the arithmetic of PyTorch's forward."""
        return (
            (self.dtype, self.weight_dtype) == (problem.dtype, problem.weight_dtype)
            and self.form not in TILE_FORMS
            and (self.N == problem.N if self.exact else self.N >= problem.N)
            and problem.N * ITEMSIZE[self.dtype] % self.vector_bytes == 0
        )

    @property
    def columns(self) -> int:
        """Columns that one CTA owns."""
        return self.N // self.cluster

    @property
    def elements(self) -> int:
        """Elements of x in one vector."""
        return self.vector_bytes // ITEMSIZE[self.dtype]

    @property
    def vectors(self) -> int:
        """Vectors of one row that a thread holds at once."""
        if self.form == "twice":
            return VECTORS_READ_TWICE
        if self.form in TILE_FORMS:
            return _TILE_COLUMNS_OF_THREAD // self.elements
        return ceil_div(self.columns, self.threads_per_row * self.elements)

    @property
    def warps_per_row(self) -> int:
        return ceil_div(self.threads_per_row, WARP)

    @property
    def sums_offset(self) -> int:
        """Bytes of shared memory in front of the sums: two transaction barriers of each team of a
        CTA in a cluster."""
        return 16 * self.rows_per_cta if self.cluster > 1 else 0

    @property
    def smem_bytes(self) -> int:
        if self.warps_per_row == 1 and self.cluster == 1:
            return 0
        sums = self.rows_in_flight * self.warps_per_row * self.cluster
        return self.sums_offset + round_up(2 * self.rows_per_cta * sums * 4, 16)

    @cached_property
    def id(self) -> str:
        """A readable name that is unique to the source."""
        source = replace(self, ctas_per_sm=min(1, self.ctas_per_sm))
        digest = hashlib.sha256(repr(astuple(source)).encode()).hexdigest()[:8]
        weight = "" if self.weight_dtype == self.dtype else f"w{self.weight_dtype}_"
        width = "any" if self.N == ANY_COLUMNS else f"{'n' if self.exact else 'upto'}{self.N}"
        shape = f"{self.threads_per_row}x{self.rows_per_cta}x{self.rows_in_flight}"
        return f"forward_{self.form}_{width}_{self.dtype}_{weight}{shape}_{digest}"

    def spec(self, sms: int) -> ForwardSpec:
        """The facts that a launch on `sms` multiprocessors needs."""
        return ForwardSpec(
            name=self.id,
            sms=sms,
            **{fact: getattr(self, fact) for fact in _FACTS},
        )


def make_forward(config: Config, problem: Problem, **facts: Any) -> ForwardVariant:
    """The variant that serves the rows of `problem` with `config`, for any M. facts: its others."""
    knobs: dict[str, Any] = dict(config)
    return ForwardVariant(problem.N, problem.dtype, problem.weight_dtype, **knobs, **facts)


_FACTS = [field.name for field in fields(ForwardSpec) if field.name not in ("name", "sms")]

CompiledForward = tuple[ForwardVariant, Compiled]
