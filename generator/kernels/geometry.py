"""The registers of a thread, and the memory of one CTA of a config, in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from generator.kernels.row_geometry import VECTOR, Config, RowGeometry
from generator.target import WARP
from normforge.spec import CHUNK_ROWS, ceil_div, round_up

BLOCK_ROWS = 16
"""Rows that a thread adds up at once. With blocks of b rows the error of a sum of n grows like that
of b + n / b additions, not of n (Higham, "Accuracy and Stability of Numerical Algorithms", 4.2),
least for b = sqrt(n); teams on an H200 have 31 to 500 rows."""


@dataclass(frozen=True)
class Geometry(RowGeometry):
    """The geometry of a config for one row length, with the memory that it takes."""

    @property
    def register_estimate(self) -> int:
        """Registers that a thread cannot do without: partial dw, the row's vectors (one row at a
        time when they are reloaded), the weight where it is kept, and addresses and counters."""
        rows = 1 if self["reload"] == "smem" else self["rows_in_flight"]
        early = len(self.signature.early) + len(self.signature.paired) * (not self.own_partners)
        streams = early * self.itemsize + self.residual_itemsize
        row = ceil_div(rows * self.row_elements * streams, 4)
        if self["reload"] == "smem":
            row = min(row, 8)
        if self.early_sums:  # a number for each element, and x
            row = rows * self.row_elements + row // 2
        shared = rows * self.group_vectors * self.elements * len(self.signature.groups)
        row += shared // 2 if self.interleaved else shared
        kept = self["weight_in"] == "registers"
        columns = len(self.signature.all_columns) * kept
        weight = columns * ceil_div(self.row_elements * self.weight_itemsize, 4)
        return int(self.accumulators + row + weight + 24)

    # Shared memory, in bytes from the start of the dynamic allocation.

    @property
    def sums_offset(self) -> int:
        """Offset of the sums, behind the mbarriers."""
        exchange = 2 if self["cluster"] > 1 else 0
        return round_up(self.teams * (self.stage_barriers + exchange) * 8, 16)

    @property
    def stage_barriers(self) -> int:
        """Transaction barriers of one team's stages, with those that hand them back."""
        kinds = {"bulk": 1, "producer": 2}.get(self["pipeline"], 0)
        return int(kinds * self["stages"])

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
        of_thread = round_up(self.row_elements * self.weight_itemsize, 16)
        return int(len(self.signature.all_columns) * of_thread * self["threads_per_row"])

    @property
    def broadcast_offset(self) -> int:
        """Two words for handing values of thread 0 to the CTA."""
        return self.weight_offset + self.weight_bytes

    @property
    def block_batches(self) -> int:
        """Batches that a thread adds up before it adds their sum to the sum of its rows so far; 0:
        it adds all one after another."""
        if self.run_rows or not self.in_blocks or not self.sums.column_sums:
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
        rows, stages = self["rows_in_flight"], self["stages"]
        if self["pipeline"] in ("bulk", "producer"):
            whole = self.staged_groups * self.rotated // 2 * 4
            return int(self.teams * stages * (rows * self.batch_row_bytes + whole))
        if self["pipeline"] == "async":
            early = len(self.signature.early) * self.itemsize
            vector = self.elements * (early + self.residual_itemsize)
            numbers = self.elements * (2 if self.interleaved else 4)
            beside = self.staged_groups * numbers * self.group_vectors
            # Rows side by side in a warp, of one group, have one copy.
            sharing = self.rows_abreast if self.team_threads == WARP and not self.joined else 1
            copies = beside * (self.threads // sharing)
            return int(stages * (rows * vector * self.vectors * self.threads + copies))
        return 0

    @property
    def may_stage(self) -> bool:
        """True when numbers of groups can lie in stages beside the rows: whole ones for the copy
        engine, at least 4 bytes for each thread otherwise."""
        if self["pipeline"] == "direct" or self["cluster"] > 1 or not self.signature.groups:
            return False
        if self["pipeline"] == "async":
            return self["vector_bytes"] >= (8 if self.interleaved else 4)
        return self.rotated // 2 * self.itemsize % VECTOR == 0

    @property
    def staged_groups(self) -> int:
        """Rows of numbers that groups share, of all tensors, for which a stage has room: those of
        one group, or of one for each row where rows of joined heads have one each. (Where a batch
        has rows of several groups, stages have none.)"""
        groups = self["rows_in_flight"] if self.joined else 1
        return int(self.stages_groups * groups * len(self.signature.groups))

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
        """True when every CTA leaves its partial dw in a row of its own and a tail sums slices of
        all rows; else CTAs add theirs to what others have left."""
        return self.strategy.adds == "by_index"

    @property
    def fold_bytes(self) -> int:
        """Partial dw of every team, in the memory of the stages once they are done; none where a
        single team stores whole float4s from its registers, or every team does."""
        alone = self.teams == 1 and self.elements % 4 == 0 and self.stores_rows
        alone = alone and not self.shifted
        return 0 if alone or self.run_rows else self.teams * self.partial_stride * 4

    @property
    def tail_columns(self) -> int:
        """Columns that a CTA of the tail sums at once."""
        if self["slice_columns"]:
            return int(self["slice_columns"])
        if self.strategy.way == "last_cta":
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


__all__ = ["BLOCK_ROWS", "Config", "Geometry"]
