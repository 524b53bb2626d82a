"""Computes the numbers of one launch from a kernel's fixed facts and a number of rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import gcd, isqrt
from typing import ClassVar

MAIN_KERNEL = "rmsnorm_backward"
SUM_KERNEL = "sum_partials"
"""The `extern "C"` names in a cubin of RMSNorm's backward; the first is the operation's in others,
and the second exists where `KernelSpec.way` says so."""
FORWARD_KERNELS = ("rmsnorm_forward", "rmsnorm_forward_residual")
"""The `extern "C"` names in every forward cubin: without and with a residual."""

CHUNK_ROWS = 4096
"""Rows of a chunk of a batch-invariant kernel, whose chunks are added one after another: a batch
may be divided at multiples of it into calls that add to one dw without a change of its bits."""

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of one element of each supported dtype."""

UNBOUNDED = 1 << 30
"""Multiprocessors that a grid of as many CTAs as the rows need counts on."""
_MOST_CTAS = (1 << 31) - 1
_MOST_ROWS_IN_RUNS = 1 << 31
"""Batch-invariant kernels number rows in 32 bits."""
_MOST_ROUNDS_OF_RUNS = 4


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, unit: int) -> int:
    return ceil_div(a, unit) * unit


@dataclass(frozen=True)
class KernelSpec:
    """The facts of one compiled variant that its launches need.

    N: row length, or with exact False the longest one served, and `least` the shortest. threads,
    sum_threads: CTA sizes of the main and the second kernel. way: who adds up the partial sums over
    rows that CTAs have, and so which memory there is between them. Each leaves its own in a row of
    the workspace, of which all CTAs sum `slices`, or slices whose words say themselves that they
    are there (`flagged_slices`), or the `last_cta` or a `second_kernel` sums; or each adds its own
    to those before, `in_turns` or `on_arrival`; "" without sums. partial_columns: sums over rows of
    one CTA, one or more for every column. partial_stride: floats from one partial row of dw to the
    next. batch_rows: rows of a batch, which the threads of a team work on at once; rows_per_cta:
    teams of a CTA. sms: multiprocessors the grid counts on, UNBOUNDED for as many CTAs as rows
    need; they are stored and not those of the device, so that the order of every sum is fixed, too.
    vector_bytes: alignment that pointers and row strides need; of a kernel whose `row_period` is
    not 1 only pointers, and its rows lie one behind the other.
    offset: adds a number to the weight; residual: dtype of the residual's gradient that it adds to
    dx, "" for none. operation: also the name of the main kernel. run_rows, group_rows: of a
    batch-invariant kernel, else 0: rows that a CTA adds up at once, and rows whose runs are added
    one after another. leaves: the sums that its CTAs leave in the workspace: of `groups`, with runs
    for the chunk that is not full; of `runs`, unless they are very many; or of `both`, groups while
    they fill rounds of all CTAs and runs behind them. producer: whether the last of the CTA's warps
    only asks for the rows of the others. rotation: of heads, as shape_names.py has it.
    """

    name: str
    N: int
    exact: bool
    dtype: str
    weight_dtype: str
    strategy: str
    determinism: str
    threads: int
    sum_threads: int
    smem_bytes: int
    vector_bytes: int
    partial_columns: int
    partial_stride: int
    slice_columns: int
    batch_rows: int
    rows_per_cta: int
    cluster: int
    dependent: bool
    levels: int
    ctas_per_sm: int
    even_grid: bool
    sms: int
    offset: bool = False
    residual: str = ""
    least: int = 1
    # The repr leaves it out: what the tuner identifies by that had no such field.
    operation: str = field(default=MAIN_KERNEL, repr=False)
    run_rows: int = field(default=0, repr=False)
    group_rows: int = field(default=0, repr=False)
    leaves: str = field(default="", repr=False)
    producer: bool = field(default=False, repr=False)
    way: str = field(default="", repr=False)
    rotation: str = field(default="", repr=False)

    @cached_property
    def participants(self) -> int:
        """Clusters of the largest grid (CTAs, without clusters), which are to run at once unless
        `sms` is UNBOUNDED."""
        if self.sms == UNBOUNDED:
            return _MOST_CTAS // self.cluster
        return max(1, self.sms * self.ctas_per_sm // self.cluster)

    @cached_property
    def row_period(self) -> int:
        """Rows after which one begins at the same place within a vector: 1 for whole vectors."""
        whole = gcd(self.vector_bytes, self.N * ITEMSIZE[self.dtype])
        return self.vector_bytes // whole if self.exact else 1

    @cached_property
    def grid_step(self) -> int:
        """A grid of several rounds is a multiple of this: a team's rows all begin alike."""
        return self.row_period // gcd(self.row_period, self.rows_per_cta)

    @cached_property
    def ledger_words(self) -> int:
        """uint32 words of one rank's ledger: its two words, then a place for every slice that is
        handed over; whole lines of 128 bytes."""
        return round_up(2 + ceil_div(self.partial_columns, self.slice_columns), 32)

    @property
    def has_second_kernel(self) -> bool:
        return self.way == "second_kernel"

    def idle(self, M: int) -> float:
        """Rows that the largest grid would work on in the time that it takes for M, by M."""
        if self.sms == UNBOUNDED:
            return 1.0
        at_once = self.participants * self.rows_per_cta * self.batch_rows
        return ceil_div(M, at_once) * at_once / M


@dataclass(frozen=True)
class ForwardSpec:
    """The facts of one compiled forward that its launches need.

    N: row length, or with exact False the longest one served. threads: of one CTA. rows_per_cta:
    rows that a CTA works on at once, each by threads of its own; rows_in_flight: consecutive rows
    that those threads work on together. vector_bytes: alignment that pointers and row strides need.
    ctas_per_sm: CTAs for each of `sms` multiprocessors, which then walk over the rows; 0 for as
    many CTAs as the rows need. Every forward takes an offset and a residual of x's dtype.
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
    offset: ClassVar[bool] = False
    residual: ClassVar[str] = ""
    rotation: ClassVar[str] = ""
    least: ClassVar[int] = 1

    def grid(self, M: int) -> int:
        """CTAs of a launch for M >= 1 rows."""
        needed = ceil_div(M, self.rows_per_cta * self.rows_in_flight)
        if self.ctas_per_sm:
            needed = min(needed, max(1, self.sms * self.ctas_per_sm // self.cluster))
        return needed * self.cluster

    def idle(self, M: int) -> float:
        """Return 1, as no SM idles: the hardware hands rows to whichever is free."""
        return 1.0


@dataclass(frozen=True)
class Launch:
    """The numbers of one launch.

    grid: CTAs; participants: CTAs that contribute to one column of dw (grid / cluster);
    group: participants in one group of a two-level strategy, or groups of rows of which the whole
    sum is left in the workspace (KernelSpec.leaves); sum_grid: CTAs of the second kernel, 0 without
    one; partials: sums in the workspace of each column; counters and zeroed: uint32 and fp32 words
    that are zero before and after every call; scratch: fp32 words of any content.
    """

    grid: int
    participants: int
    group: int
    sum_grid: int
    counters: int
    zeroed: int
    scratch: int
    partials: int

    @cached_property
    def zeroed_offset(self) -> int:
        """Byte offset of the zeroed words: the counters come first, in whole 128-byte lines."""
        return round_up(self.counters, 32) * 4

    @cached_property
    def scratch_offset(self) -> int:
        return self.zeroed_offset + round_up(self.zeroed, 32) * 4

    @cached_property
    def workspace_bytes(self) -> int:
        return self.scratch_offset + self.scratch * 4


def plan_launch(spec: KernelSpec, M: int) -> Launch:
    """The launch of `spec` for M >= 1 rows. The first team of every CTA has a batch: a CTA that
    arrives early does so when its first team begins its last one. Where a team has a second batch,
    the grid is a multiple of `grid_step`. Raises ValueError for more rows than a batch-invariant
    kernel can count, an unknown way to add, and where fewer CTAs fit than `grid_step`.
    """
    if spec.run_rows:
        if M >= _MOST_ROWS_IN_RUNS:
            raise ValueError(
                f"{M} rows: batch-invariant kernels take fewer than {_MOST_ROWS_IN_RUNS}; split "
                f"the batch at a multiple of {CHUNK_ROWS}"
            )
        needed = _units(spec, M, _whole_groups(spec, M, 1) if spec.leaves == "groups" else 0)
    else:
        needed = ceil_div(M, spec.batch_rows * spec.rows_per_cta)
    fit, several = spec.participants, needed > spec.participants
    if several:
        fit -= fit % spec.grid_step
        if fit == 0:
            raise ValueError(f"{spec.name} needs {spec.grid_step} CTAs at once, and fewer fit")
    participants = min(fit, needed)
    if spec.even_grid:
        participants = ceil_div(needed, ceil_div(needed, fit))
    if several:
        participants = round_up(participants, spec.grid_step)
    group = participants if spec.levels == 1 else isqrt(participants - 1) + 1
    groups = ceil_div(participants, group)
    partials = participants
    if spec.run_rows:
        group = _whole_groups(spec, M, participants)
        partials = _units(spec, M, group)
    sum_grid = 0
    if spec.has_second_kernel:
        sum_grid = ceil_div(spec.partial_columns, spec.slice_columns) * spec.cluster
    counters, zeroed, scratch = _workspace(spec, participants, groups, partials)
    return Launch(
        grid=participants * spec.cluster,
        participants=participants,
        group=group,
        sum_grid=sum_grid,
        counters=counters,
        zeroed=zeroed,
        scratch=scratch,
        partials=partials,
    )


def _workspace(
    spec: KernelSpec, participants: int, groups: int, partials: int
) -> tuple[int, int, int]:
    """The counters, zeroed words and words of scratch of a launch. groups: of participants;
    partials: sums that are left of each column."""
    ranks, row = spec.cluster, spec.partial_stride * spec.cluster
    match spec.way:
        case "":
            return 0, 0, 0
        case "slices":
            return ranks * spec.ledger_words, 0, partials * row
        case "flagged_slices":
            return ranks * spec.ledger_words, participants * row, 0
        case "second_kernel":
            return 0, 0, partials * row
        case "last_cta":  # arrivals in every group; groups done
            sums = participants + (groups if spec.levels == 2 else 0)
            return ranks * (groups + 1), 0, sums * row
        case "in_turns":  # start tickets; turns in every group; turns of the groups
            return 1 + groups + 1, 0, groups * row
        case "on_arrival":  # arrivals; the sums themselves
            return ranks, row, 0
    raise ValueError(f"{spec.name} adds in a way of another version: {spec.way}")


def _whole_groups(spec: KernelSpec, M: int, participants: int) -> int:
    """Groups of rows whose sum is left as a whole: those of so many first chunks."""
    in_chunk = CHUNK_ROWS // spec.group_rows
    groups = M // CHUNK_ROWS * in_chunk
    rounds = groups // participants
    if spec.leaves != "groups":
        groups = rounds * participants // in_chunk * in_chunk
    # The sums of too many runs would take more memory than they save time.
    return 0 if spec.leaves == "runs" and rounds < _MOST_ROUNDS_OF_RUNS else groups


def _units(spec: KernelSpec, M: int, whole: int) -> int:
    """The sums of `whole` groups and of the runs behind them: `Units` in runs.cuh."""
    in_chunk = CHUNK_ROWS // spec.group_rows
    slabs, rest = divmod(M - whole * spec.group_rows, in_chunk * spec.run_rows)
    return whole + slabs * in_chunk + min(in_chunk, ceil_div(rest, spec.rows_per_cta))
