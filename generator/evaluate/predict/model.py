"""The terms of the analytical model: its constants, and targets and variants in its units.

Times are microseconds throughout. docs/prediction.md is the one-page account.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from generator.kernels.variant import Variant
from generator.operations import operation_of
from generator.problem import Problem
from generator.target import Target
from normforge.spec import Launch, ceil_div


@dataclass(frozen=True)
class Model:
    """The constants, each with its unit and its source.

    Sources: `floor`: least squares over `torch.add(x, dy, out=dx)` on one H200, 47 shapes;
    `kernels`: chosen to meet ten hand-written kernels timed on one H200; `trials`: chosen by a
    coarse scan over the tuner's own trials on one H200 (generated/h200); `sheet`: a vendor's
    document; `estimate`: an order of magnitude that nothing here was measured for.
    """

    # Launch and memory
    launch_us: float = 4.05  # µs; floor: a kernel in a CUDA graph without its memory latency
    memory_latency_us: float = 0.65  # µs, load to use; kernels (with launch_us 4.7; floor)
    memory_efficiency: float = 0.921  # fraction of the label's bandwidth; floor (4.42 of 4.8 TB/s)
    dirty_fraction: float = 0.14  # of L2, written back while traffic displaces it; floor
    row_efficiency: float = 0.97  # fraction of torch.add's rate that row kernels reach; kernels
    port_bytes_per_clock: float = 64.0  # bytes/clock between L2 and one SM; sheet (A100 to H100)
    l2_bytes_per_clock: float = 24.0  # bytes/clock per SM of the GPU, all SMs at once; estimate
    l2_latency_us: float = 0.3  # µs, load to use of what other SMs wrote; estimate
    l2_usable: float = 0.5  # fraction of L2 that partial rows may fill while rows pass; estimate

    # Main loop
    smoothness: float = 5.0  # exponent of the smooth maximum, no unit; kernels
    arithmetic_instructions: float = 8.0  # per element: row sum, dw, dx, narrowing; estimate
    sum_instructions: float = 1.0  # per element, sum and statistic beyond RMSNorm's; estimate
    widen_bf16: float = 1.0  # instructions per element read: a shift or a mask; from the source
    widen_fp16: float = 2.0  # the same: half a shift, a conversion at half rate; estimate
    access_instructions: float = 2.0  # per vector moved: the access and its address; estimate
    bounds_instructions: float = 1.0  # per element of a vector that may end the row; estimate
    row_instructions: float = 40.0  # per warp and row: shuffles, addresses, loop; estimate
    issue_per_clock: float = 3.0  # warp instructions/clock of an SM, of 4 possible; estimate
    copy_clocks: float = 48.0  # clocks of the copy engine per bulk copy; estimate
    shuffle_clocks: float = 200.0  # latency of the row sum inside a warp, and of waking; estimate
    barrier_clocks: float = 100.0  # row sum between warps: smem, barrier, second sum; estimate
    barrier_clocks_per_warp: float = 2.0  # clocks for every warp that arrives; estimate
    cluster_clocks: float = 500.0  # row sum between 2 CTAs: remote store, skew, wait; trials
    cluster_growth: float = 0.4  # its growth as a power of CTAs / 2, no unit; trials
    until_sum_fraction: float = 0.5  # of a batch's time, until its row sum is known; estimate

    # dw reductions
    smem_bytes_per_clock: float = 128.0  # bytes/clock of an SM's shared memory; sheet
    arrival_us: float = 1.5  # µs: publish, count, and be seen by a waiting CTA; estimate
    release_us: float = 0.3  # µs of it that a release waits for the partials; trials (mailbox)
    counter_clocks: float = 2.0  # clocks for every arrival at one counter; estimate
    loads_in_flight: int = 4  # rows of partials that a summing thread has under way; estimate
    slice_clocks: float = 400.0  # clocks per slice: sum across lanes, store dw; estimate
    second_launch_us: float = 2.6  # µs: a dependent kernel of the same graph; estimate
    overlapped_launch_us: float = 0.8  # µs: the same, launched programmatically; trials
    turn_us: float = 1.2  # µs: one turn of a chain without its add; estimate (1 to 1.5 reported)
    add_bytes_per_clock: float = 8.0  # bytes/clock per SM of the GPU of L2 vector adds; estimate
    bulk_add_bytes_per_clock: float = 16.0  # the same for bulk reduce-add; estimate
    cluster_us: float = 1.0  # µs: start and end of a launch in clusters; estimate

    def smooth_max(self, a: float, b: float) -> float:
        """Return the larger of two bounds, and more where they are alike, because neither hides the
        other completely."""
        return float((a**self.smoothness + b**self.smoothness) ** (1 / self.smoothness))


MODEL = Model()


@dataclass(frozen=True)
class Rates:
    """A target in the model's units: bytes per µs and clocks per µs."""

    target: Target
    model: Model

    @cached_property
    def clocks(self) -> float:
        return self.target.clock_hz * 1e-6

    @cached_property
    def memory(self) -> float:
        return self.target.bandwidth * 1e-6 * self.model.memory_efficiency

    @cached_property
    def l2(self) -> float:
        return self.model.l2_bytes_per_clock * self.target.sms * self.clocks

    @cached_property
    def port(self) -> float:
        return self.model.port_bytes_per_clock * self.clocks

    def written_back(self, traffic: float) -> float:
        """Bytes of older data that `traffic` bytes through a cold L2 push out to memory."""
        return self.model.dirty_fraction * min(traffic, self.target.l2_bytes)

    def exchange(self, size: float, sms: int) -> float:
        """Time in which `sms` SMs write or read `size` bytes of workspace: in L2 as far as they
        fit beside the rows, the rest in memory."""
        inside = min(size, self.model.l2_usable * self.target.l2_bytes)
        return inside / min(self.l2, sms * self.port) + (size - inside) / self.memory


def floor_us(problem: Problem, target: Target, model: Model = MODEL) -> float:
    """µs of the floor of a backward: torch.add over the bytes that it moves, cold L2, inside a
    CUDA graph."""
    rates = Rates(target, model)
    traffic = operation_of(problem).traffic_bytes(problem)
    moved = traffic + rates.written_back(traffic)
    return model.launch_us + model.memory_latency_us + moved / rates.memory


@dataclass(frozen=True)
class Case:
    """One variant on one problem and target, with what every part of the model asks for."""

    variant: Variant
    problem: Problem
    rates: Rates
    launch: Launch
    resident: int

    @property
    def model(self) -> Model:
        return self.rates.model

    @cached_property
    def sms_used(self) -> int:
        return min(self.launch.grid, self.rates.target.sms)

    @cached_property
    def ctas_per_sm(self) -> int:
        """CTAs that the busiest SM runs, at once or in turn."""
        return ceil_div(self.launch.grid, self.rates.target.sms)

    @cached_property
    def instructions(self) -> float:
        """Warp instructions of one team for one batch of rows."""
        v, m = self.variant, self.model
        widen = {"bf16": m.widen_bf16, "fp16": m.widen_fp16, "fp32": 0.0}
        reload, weight_again = v["reload"] == "smem", v["weight_in"] == "smem"
        # Vectors of x, dy and dx; two more for cp.async, a reload, the weight read in both passes.
        vectors = 3 + 2 * (v["pipeline"] == "async") + 2 * reload + 2 * weight_again
        more = v.sums.row_sums + v.sums.column_sums + v.sums.statistics - 3
        per_element = m.arithmetic_instructions + m.sum_instructions * more
        per_element += m.access_instructions * vectors / v.elements
        per_element += (
            2 * (1 + reload) * widen[v.dtype] + (1 + weight_again) * widen[v.weight_dtype]
        )
        per_element += m.bounds_instructions * v.bounds_checked_vectors / v.vectors
        per_warp = v.row_elements * per_element + m.row_instructions
        return float(v["rows_in_flight"] * v.warps_per_row * per_warp)

    @cached_property
    def batch_us(self) -> float:
        """A team's time from the arrival of a batch to its dx, alone on the SM."""
        v, m = self.variant, self.model
        issue = self.instructions / min(v.warps_per_row, m.issue_per_clock)
        clocks = m.shuffle_clocks + issue
        if v.warps_per_row > 1:
            clocks += m.barrier_clocks + m.barrier_clocks_per_warp * v.warps_per_row
        if v["cluster"] > 1:
            clocks += m.cluster_clocks * (v["cluster"] / 2) ** m.cluster_growth
        return clocks / self.rates.clocks

    @cached_property
    def period_us(self) -> float:
        """A team's time per batch when memory bandwidth is no limit: Little's law for one team.

        The row sum of batch b asks for batch b + depth, which arrives a memory latency later. One
        stage is kept back for a reload; direct loads of a batch wait for the end of the last."""
        v, m = self.variant, self.model
        if v["pipeline"] == "direct":
            return m.memory_latency_us + self.batch_us
        depth = max(1, v["stages"] - (v["reload"] == "smem"))
        until_sum = m.until_sum_fraction * self.batch_us
        return m.smooth_max(self.batch_us, (m.memory_latency_us + until_sum) / depth)

    @property
    def partial_row_bytes(self) -> int:
        """One row of partial dw: fp32, all columns."""
        return int(4 * self.variant.partial_stride * self.variant["cluster"])

    def slices(self, rows: int, threads: int, ctas: int, count: int) -> float:
        """Time in which `ctas` CTAs sum `count` slices of `tail_columns` columns over `rows` rows
        of partials: the longer of latency (rows a thread reads one after another) and traffic."""
        m, v = self.model, self.variant
        steps = ceil_div(rows, max(1, v.lanes(threads)) * m.loads_in_flight)
        each = steps * m.l2_latency_us + m.slice_clocks / self.rates.clocks
        size = 4.0 * rows * count * v.tail_columns
        sms = min(ctas, count, self.rates.target.sms)
        return max(ceil_div(count, ctas) * each, self.rates.exchange(size, sms))
