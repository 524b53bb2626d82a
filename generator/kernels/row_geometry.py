"""The threads, vectors and registers of a config for one row length.

The templates receive these numbers as `constexpr` lines (render.py). What depends on M as well, the
grid and the workspace, is in normforge/spec.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, lcm
from typing import Any

from generator.errors import NormforgeError
from generator.kernels.strategies import Strategy, strategy_of
from generator.problem import RMSNORM_BACKWARD, ItemSizes
from generator.target import WARP
from normforge.spec import ceil_div, round_up

VECTOR = 16
"""Bytes of the vectors of the copy engine, and of rows that are no whole vectors."""

_BANKS = 128
"""Bytes of all banks of shared memory: what 8 threads read at once in vectors of 16 bytes."""

Config = Mapping[str, int | str]
"""Knob name to value, for every knob of the space."""


@dataclass(frozen=True)
class RowGeometry(ItemSizes):
    """The geometry of a config for one row length. exact: N is a constant; if False, the kernel
    takes any N from `least` to this one. in_blocks: rows are added in blocks; if False, one after
    another, because there is no room for the sums of blocks."""

    config: Config
    N: int
    dtype: str
    weight_dtype: str
    exact: bool = True
    offset: bool = False
    residual: str = ""
    least: int = 1
    in_blocks: bool = True
    operation: str = RMSNORM_BACKWARD
    rotation: str = ""

    @property
    def batch_row_bytes(self) -> int:
        """Bytes of a stage for one row: of the rows read early, and of those added."""
        return len(self.signature.early) * self.stage_row_bytes + self.residual_row_bytes

    def __getitem__(self, knob: str) -> Any:
        """Raises NormforgeError where the config has no such knob."""
        try:
            return self.config[knob]
        except KeyError:
            why = f"a config for N = {self.N} has no '{knob}': it was made for other templates"
            raise NormforgeError(f"{why}; tune its shape again") from None

    @property
    def run_rows(self) -> int:
        """Rows whose sum the teams of a CTA form together, where the order of all sums follows from
        the rows alone (templates/rows/runs.cuh); 0 where it follows from the grid as well."""
        return int(self.config.get("run_rows", 0))

    @property
    def group_rows(self) -> int:
        """Rows whose runs are added one after another; 0 as in `run_rows`."""
        return int(self.config.get("group_rows", 0))

    @property
    def strategy(self) -> Strategy:
        """The strategy by which the partial dw of all CTAs becomes dw."""
        return strategy_of(self.config)

    @property
    def team_threads(self) -> int:
        """Threads that go through batches of rows together: those of a row, but whole warps."""
        return lcm(WARP, self["threads_per_row"])

    @property
    def rows_abreast(self) -> int:
        """Rows that a team works on side by side, each with as many threads next to each other."""
        return int(self.team_threads // self["threads_per_row"])

    @property
    def batch_rows(self) -> int:
        """Rows that a team works on at once."""
        return int(self["rows_in_flight"] * self.rows_abreast)

    @property
    def threads(self) -> int:
        """Threads of one CTA that compute: those of its teams."""
        return self.team_threads * self["rows_per_cta"]

    @property
    def producer(self) -> bool:
        """True when a warp of its own asks for the rows of all teams."""
        return bool(self["pipeline"] == "producer")

    @property
    def early_sums(self) -> bool:
        """True when a thread adds to its sums over the rows before it knows the row sum."""
        return self.config.get("column_sums", "late") == "early"

    @property
    def holds_numbers(self) -> bool:
        """True when the lanes of a warp hold the rstd of many rows, and not of the next one."""
        return self.config.get("row_numbers", "next") == "held"

    @property
    def groups_ahead(self) -> int:
        """Batches ahead at which the L2 is asked for what rows of a group share; 0: it is not."""
        return int(self.config.get("groups_ahead", 0))

    @property
    def stages_groups(self) -> bool:
        """True when stages hold what rows of a group share, beside the rows."""
        return self.config.get("groups_in", "registers") == "smem"

    @property
    def cta_threads(self) -> int:
        """Threads of one CTA."""
        return int(self.threads + WARP * self.producer)

    @property
    def least_columns(self) -> int:
        """The least N that the kernel takes."""
        return self.N if self.exact else self.least

    @property
    def columns(self) -> int:
        """Columns that one CTA owns."""
        return self.N // self["cluster"]

    @property
    def row_bytes(self) -> int:
        """Bytes of one CTA's part of a row of x."""
        return self.columns * self.itemsize

    @property
    def residual_row_bytes(self) -> int:
        """Bytes of one CTA's part of a row of the residual's gradient."""
        return self.columns * self.residual_itemsize

    @property
    def widest_vector(self) -> int:
        """Widest power-of-two vector up to 16 bytes that divides the row."""
        return next(size for size in (16, 8, 4, 2, 1) if self.row_bytes % size == 0)

    @property
    def shifted(self) -> bool:
        """True when rows are no whole vectors, so that they begin at any place within one."""
        return bool(self.exact and self.row_bytes % self["vector_bytes"])

    @property
    def may_shift(self) -> bool:
        """True for kernels that the templates have code for if rows are no whole vectors."""
        plain = self.operation == RMSNORM_BACKWARD and not self.residual and self.exact
        alone = self["cluster"] == 1 and self["rows_in_flight"] == 1
        in_registers = self["weight_in"] == "registers" and self["vector_bytes"] == VECTOR
        return bool(plain and alone and in_registers and self.producer and self.row_bytes >= VECTOR)

    @property
    def touched_columns(self) -> int:
        """Columns from the beginning of the first vector of a row to its end, at most."""
        if not self.shifted:
            return self.columns
        return self.columns + self.elements - gcd(self.elements, self.columns)

    @property
    def stage_row_bytes(self) -> int:
        """Bytes of a stage for one CTA's part of a row of x."""
        if not self.shifted:
            return self.row_bytes
        return round_up(self.touched_columns * self.itemsize, VECTOR)

    @property
    def grid_step(self) -> int:
        """Return what KernelSpec.grid_step is."""
        vector = self["vector_bytes"]
        period = vector // gcd(vector, self.row_bytes) if self.shifted else 1
        return int(period // gcd(period, self.teams))

    @property
    def elements(self) -> int:
        """Elements of x in one vector."""
        return max(1, self["vector_bytes"] // self.itemsize)

    @property
    def vectors(self) -> int:
        """Vectors of a row that one thread owns."""
        return ceil_div(self.touched_columns, self["threads_per_row"] * self.elements)

    @property
    def bounds_checked_vectors(self) -> int:
        """Vectors that a kernel for many N has to check against the end of the row."""
        known = self.least_columns // (self["threads_per_row"] * self.elements)
        known *= self["cluster"] == 1  # what a cluster shares may end in any CTA
        return 0 if self.exact else self.vectors - min(self.vectors, known)

    @property
    def row_elements(self) -> int:
        """Elements of a row that one thread owns."""
        return self.vectors * self.elements

    @property
    def accumulators(self) -> int:
        """fp32 partial sums over rows that one thread keeps."""
        return self.row_elements * self.sums.column_sums

    @property
    def idle_columns(self) -> int:
        return self.row_elements * self["threads_per_row"] - self.columns

    @property
    def block_columns(self) -> int:
        """Columns that share a scale of what is quantized; 1 where nothing is."""
        return self.signature.scales.block if self.signature.scales else 1

    @property
    def block_vectors(self) -> int:
        """Vectors of a thread in a block of columns that share a scale: the more, the fewer threads
        have to agree on it. Those still read all banks of shared memory at once."""
        span = self.block_columns // self.elements * self["vector_bytes"]
        fit = (n for n in (4, 2) if self.vectors % n == 0 and span // n >= _BANKS)
        return next(fit, 1)

    @property
    def block_lanes(self) -> int:
        """Threads that have columns of such a block."""
        return self.block_columns // (self.elements * self.block_vectors)

    @property
    def half_lanes(self) -> int:
        """Threads with a vector of one half of a head each."""
        return self.rotated // (2 * self.elements)

    @property
    def halves(self) -> bool:
        """True when a row is heads of which a thread has vectors in pairs: one in the first half,
        and one half a head behind it."""
        if not self.joined or self.interleaved or self.half_lanes == 0:
            return False
        if self["threads_per_row"] % self.half_lanes or self.vectors % 2 or self.idle_columns:
            return False
        # Where stages hold whole rows, threads that read at once need all banks between them.
        by_row = self["pipeline"] in ("bulk", "producer")
        return not by_row or self.half_lanes * self["vector_bytes"] % _BANKS == 0

    @property
    def own_partners(self) -> bool:
        """True when a thread has both columns of a pair (kOwnPartners in pairs.cuh.j2)."""
        alone = self["cluster"] == 1 and self.idle_columns == 0
        if self.interleaved or self.joined:
            return self.interleaved or self.halves
        return bool(alone and self.rotated // 2 % (self["threads_per_row"] * self.elements) == 0)

    @property
    def group_vectors(self) -> int:
        """Vectors of a thread that have numbers of their own: kGroupVectors in groups.cuh.j2, where
        no cluster shares a row."""
        step = self["threads_per_row"] * self.elements
        if self.joined:
            of_pairs = self.rotated if self.interleaved else self.rotated // 2
            return 1 if self.halves or step % of_pairs == 0 else self.vectors
        if self.own_partners and not self.interleaved:
            return self.rotated // 2 // step
        return min(self.vectors, ceil_div(self.rotated, step))

    @property
    def exchanges(self) -> bool:
        """True when threads of a row exchange something: sums, or one column of a pair."""
        sums = self.sums.row_sums + self.sums.column_sums > 0 or self.signature.scales is not None
        return sums or (bool(self.signature.paired) and not self.own_partners)

    @property
    def teams(self) -> int:
        return int(self["rows_per_cta"])

    @property
    def warps_per_row(self) -> int:
        return self.team_threads // WARP
