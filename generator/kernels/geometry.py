"""What a config means for one row length: threads, vectors, shared memory.

The templates receive these numbers as `constexpr` lines (render.py). What depends on M as well, the
grid and the workspace, is in runtime/spec.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from generator.errors import NormforgeError
from generator.kernels.strategies import Strategy, strategy_of
from generator.problem import RMSNORM_BACKWARD, SUMS, ItemSizes, Sums
from generator.target import WARP
from normforge.spec import CHUNK_ROWS, ceil_div, round_up

Config = Mapping[str, int | str]
"""Knob name to value, for every knob of the space."""

BLOCK_ROWS = 16
"""Rows that a thread adds up at once. With blocks of b rows the error of a sum of n grows like that
of b + n / b additions, not of n (Higham, "Accuracy and Stability of Numerical Algorithms", 4.2),
least for b = sqrt(n); teams on an H200 have 31 to 500 rows."""


@dataclass(frozen=True)
class Geometry(ItemSizes):
    """What a config means for one row length. exact: N is a constant; if False, the kernel takes
    any N from `least` to this one. in_blocks: rows are added in blocks; if False, one after
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

    @property
    def sums(self) -> Sums:
        """What the kernel adds up."""
        return SUMS[self.operation]

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
        the rows alone (templates/runs.cuh); 0 where it follows from the grid as well."""
        return int(self.config.get("run_rows", 0))

    @property
    def group_rows(self) -> int:
        """Rows whose runs are added one after another; 0 as in `run_rows`."""
        return int(self.config.get("group_rows", 0))

    @property
    def strategy(self) -> Strategy:
        """How the partial dw of all CTAs becomes dw."""
        return strategy_of(self.config)

    @property
    def team_threads(self) -> int:
        """Threads that go through batches of rows together: those of a row, but at least a warp."""
        return max(WARP, self["threads_per_row"])

    @property
    def rows_abreast(self) -> int:
        """Rows that a team works on side by side, each with a part of a warp of its own."""
        return int(self.team_threads // self["threads_per_row"])

    @property
    def batch_rows(self) -> int:
        """Rows that a team works on at once."""
        return int(self["rows_in_flight"] * self.rows_abreast)

    @property
    def threads(self) -> int:
        """Threads of one CTA."""
        return self.team_threads * self["rows_per_cta"]

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
    def widest_vector(self) -> int:
        """Widest power-of-two vector up to 16 bytes that divides the row."""
        return next(size for size in (16, 8, 4, 2, 1) if self.row_bytes % size == 0)

    @property
    def elements(self) -> int:
        """Elements of x in one vector."""
        return max(1, self["vector_bytes"] // self.itemsize)

    @property
    def vectors(self) -> int:
        """Vectors of a row that one thread owns."""
        return ceil_div(self.columns, self["threads_per_row"] * self.elements)

    @property
    def bounds_checked_vectors(self) -> int:
        """Those that a kernel for many N has to check against the end of the row."""
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
    def register_estimate(self) -> int:
        """Registers that a thread cannot do without: partial dw, the row's vectors (one row at a
        time when they are reloaded), the weight where it is kept, and addresses and counters."""
        rows = 1 if self["reload"] == "smem" else self["rows_in_flight"]
        streams = 2 * self.itemsize + self.residual_itemsize
        row = ceil_div(rows * self.row_elements * streams, 4)
        if self["reload"] == "smem":
            row = min(row, 8)
        kept = self["weight_in"] == "registers"
        weight = ceil_div(self.row_elements * self.weight_itemsize, 4) if kept else 0
        return int(self.accumulators + row + weight + 24)

    @property
    def teams(self) -> int:
        return int(self["rows_per_cta"])

    @property
    def warps_per_row(self) -> int:
        return self.team_threads // WARP

    # Shared memory, in bytes from the start of the dynamic allocation.

    @property
    def sums_offset(self) -> int:
        """Behind the mbarriers."""
        stages = self["stages"] if self["pipeline"] == "bulk" else 0
        exchange = 2 if self["cluster"] > 1 else 0
        return round_up(self.teams * (stages + exchange) * 8, 16)

    @property
    def sums_per_team(self) -> int:
        """Floats of one team in one of the two buffers of the row sum: for each sum and row in
        flight, one per warp of the row and CTA of the cluster."""
        if self.warps_per_row == 1 and self["cluster"] == 1:
            return 0
        sums = self["rows_in_flight"] * self.sums.row_sums
        return int(sums * self.warps_per_row * self["cluster"])

    @property
    def weight_offset(self) -> int:
        return self.sums_offset + round_up(2 * self.teams * self.sums_per_team * 4, 16)

    @property
    def weight_bytes(self) -> int:
        if self["weight_in"] == "registers":
            return 0
        return int(round_up(self.row_elements * self.weight_itemsize, 16) * self["threads_per_row"])

    @property
    def broadcast_offset(self) -> int:
        """Two words for handing values of thread 0 to the CTA."""
        return self.weight_offset + self.weight_bytes

    @property
    def block_batches(self) -> int:
        """Batches that a thread adds up before it adds their sum to the sum of its rows so far; 0:
        it adds all one after another."""
        if self.run_rows or not self.in_blocks:
            return 0
        return max(1, BLOCK_ROWS // self["rows_in_flight"])

    @property
    def block_sums_offset(self) -> int:
        return round_up(self.broadcast_offset + 8, 16)

    @property
    def block_sums_bytes(self) -> int:
        """The sums of the blocks, of every thread; or those of a run, of every thread and two runs
        where there are teams, and those of the runs of a group, of one team."""
        if self.run_rows and self.teams > 1:
            return self.accumulators * (2 * self.threads + self.team_threads) * 4
        return self.accumulators * self.threads * 4 if self.block_batches or self.run_rows else 0

    @property
    def runs_written_offset(self) -> int:
        """The mbarrier at which the teams of a CTA meet."""
        return self.block_sums_offset + self.block_sums_bytes

    @property
    def tiles_offset(self) -> int:
        barrier = 8 if self.run_rows and self.teams > 1 else 0
        return round_up(self.runs_written_offset + barrier, 128)

    @property
    def tile_bytes(self) -> int:
        """The stages of the row pipeline."""
        rows = self["stages"] * self["rows_in_flight"]
        if self["pipeline"] == "bulk":
            return int(self.teams * rows * (2 * self.row_bytes + self.residual_row_bytes))
        if self["pipeline"] == "async":
            vector = self.elements * (2 * self.itemsize + self.residual_itemsize)
            return int(rows * vector * self.vectors * self.threads)
        return 0

    @property
    def residual_row_bytes(self) -> int:
        """Bytes of one CTA's part of a row of the residual's gradient."""
        return self.columns * self.residual_itemsize

    @property
    def partial_columns(self) -> int:
        """Sums over rows that one CTA owns: of each kind one for every column."""
        return self.columns * self.sums.column_sums

    @property
    def partial_stride(self) -> int:
        """Floats from one partial row of dw to the next in the workspace and in shared memory."""
        return round_up(self.partial_columns, 4)

    @property
    def stores_rows(self) -> bool:
        """Whether every CTA leaves its partial dw in a row of its own and a tail sums slices of all
        rows; else CTAs add theirs to what others have left."""
        return self.strategy.adds == "by_index"

    @property
    def fold_bytes(self) -> int:
        """Partial dw of every team, in the memory of the stages once they are done; none where a
        single team stores whole float4s from its registers, or every team does."""
        alone = self.teams == 1 and self.elements % 4 == 0 and self.stores_rows
        return 0 if alone or self.run_rows else self.teams * self.partial_stride * 4

    @property
    def tail_columns(self) -> int:
        """Columns that a CTA of the tail sums at once."""
        if self["slice_columns"]:
            return int(self["slice_columns"])
        if self.strategy.tail == "last_cta":
            return min(self.partial_stride, 4 * self.threads)
        return 0

    def lanes(self, threads: int) -> int:
        """Rows of partials that `threads` threads read at once in a tail of `tail_columns`."""
        return threads // (self.tail_columns // 4) if self.tail_columns else 0

    @property
    def tail_bytes(self) -> int:
        if self.strategy.launches > 1:  # the second kernel has shared memory of its own
            return 0
        rows = self.group_sums_at_once if self.run_rows else self.lanes
        return rows(self.threads) * self.tail_columns * 4

    def group_sums_at_once(self, threads: int) -> int:
        """Rows in the shared memory of `threads` threads that add up groups: Lanes::kRows."""
        groups = CHUNK_ROWS // self.group_rows
        lanes = 1 << max(1, self.lanes(threads)).bit_length() - 1
        abreast = min(max(1, WARP // (self.tail_columns // 4)), groups)
        least = max(1, groups // lanes)
        room = 1 << min(8, max(1, 2048 * abreast // threads)).bit_length() - 1
        return max(room, least) * lanes // abreast

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one CTA of the main kernel."""
        return self.tiles_offset + max(self.tile_bytes, self.fold_bytes, self.tail_bytes)
