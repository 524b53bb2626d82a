"""The numbers of a launch, counted by hand, and the choices of a package's table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normforge.spec import CHUNK_ROWS, UNBOUNDED, KernelSpec, plan_launch
from normforge.table import Table, runs_on
from tests.support.fake_driver import SPEC, TABLE, entry

ROW = 1024  # floats of one row of partial dw
TEN = replace(  # ten CTAs of two teams, whose batches have four rows
    SPEC,
    **{"sms": 5, "ctas_per_sm": 2, "cluster": 1, "rows_per_cta": 2, "batch_rows": 4},
    **{"partial_columns": ROW, "partial_stride": ROW, "slice_columns": 32, "levels": 1},
    even_grid=False,
)


@pytest.mark.parametrize(
    ("M", "even", "grid"),
    [
        *((1, False, 1), (8, False, 1), (9, False, 2), (80, False, 10), (8000, False, 10)),
        *((88, True, 6), (88, False, 10), (160, True, 10)),
    ],
)
def test_a_grid_is_what_the_rows_need_and_no_more_than_is_resident(
    M: int, even: bool, grid: int
) -> None:
    assert plan_launch(replace(TEN, even_grid=even), M).grid == grid


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize(
    ("M", "needed"), [(1, 1), (8, 1), (9, 2), (8000, 1000), (1 << 30, 1 << 27)]
)
def test_a_grid_that_waits_for_nobody_is_what_the_rows_need(
    M: int, needed: int, cluster: int
) -> None:
    """And it has no memory between its CTAs."""
    spec = replace(TEN, way="", sms=UNBOUNDED, cluster=cluster)
    launch = plan_launch(spec, M)
    assert (launch.grid, launch.participants) == (needed * cluster, needed)
    assert (launch.sum_grid, launch.workspace_bytes, launch.scratch_offset) == (0, 0, 0)
    assert spec.idle(M) == 1
    assert spec.participants * cluster < 1 << 31  # CUDA's largest grid


def memory(spec: KernelSpec, M: int = 8000) -> tuple[int, int, int, int]:
    launch = plan_launch(spec, M)
    return launch.group, launch.counters, launch.zeroed, launch.scratch


def test_every_way_to_add_has_the_memory_that_it_uses() -> None:
    two = {"levels": 2}
    assert memory(replace(TEN, way="second_kernel")) == (10, 0, 0, 10 * ROW)
    assert memory(replace(TEN, way="last_cta")) == (10, 2, 0, 10 * ROW)
    # Ten participants are three groups of four, the last one ragged, with a sum each.
    assert memory(replace(TEN, way="last_cta", **two)) == (4, 4, 0, 13 * ROW)
    assert memory(replace(TEN, way="in_turns")) == (10, 3, 0, ROW)
    assert memory(replace(TEN, way="in_turns", **two)) == (4, 5, 0, 3 * ROW)
    # A ledger of two words and one for each of 32 slices, in whole lines of 32 words.
    assert memory(replace(TEN, way="slices")) == (10, 64, 0, 10 * ROW)
    assert memory(replace(TEN, way="flagged_slices")) == (10, 64, 10 * ROW, 0)
    assert memory(replace(TEN, way="on_arrival")) == (10, 1, ROW, 0)
    assert memory(replace(TEN, way="")) == (10, 0, 0, 0)
    with pytest.raises(ValueError, match="example adds in a way of another version: in_pairs"):
        memory(replace(TEN, way="in_pairs"))


def test_regions_of_the_workspace_follow_each_other_in_whole_lines() -> None:
    launch = plan_launch(replace(TEN, way="flagged_slices"), 8000)
    assert launch.zeroed_offset == 64 * 4
    assert launch.scratch_offset == 64 * 4 + 10 * ROW * 4
    launch = plan_launch(replace(TEN, way="last_cta"), 8000)
    assert (launch.zeroed_offset, launch.scratch_offset) == (128, 128)
    assert launch.workspace_bytes == 128 + 10 * ROW * 4
    launch = replace(launch, counters=33, zeroed=5, scratch=10)  # neither fills its lines
    assert (launch.zeroed_offset, launch.scratch_offset) == (256, 384)
    assert launch.workspace_bytes == 384 + 40


# ---- Batch-invariant kernels ---------------------------------------------------------------------


@st.composite
def launches(draw: st.DrawFn) -> tuple[KernelSpec, int]:
    """A batch-invariant kernel and a number of rows."""
    teams = draw(st.sampled_from([1, 2, 4, 8]))
    run_rows = teams * draw(st.sampled_from([1, 2, 4, 8]))
    group_rows = run_rows * draw(st.sampled_from([1, 2, 4, 8, 16]))
    cluster = draw(st.sampled_from([1, 2, 4, 8]))
    spec = replace(
        SPEC,
        **{"run_rows": run_rows, "group_rows": group_rows, "cluster": cluster},
        leaves=draw(st.sampled_from(["groups", "runs", "both"])),
        way=draw(st.sampled_from(["slices", "second_kernel"])),
        sms=draw(st.integers(1, 160)),
        ctas_per_sm=draw(st.integers(1, 4)),
        rows_per_cta=teams,
        batch_rows=draw(st.sampled_from([1, 2, 4])),
        even_grid=draw(st.booleans()),
        **{"partial_columns": ROW, "partial_stride": ROW, "slice_columns": 32},
    )
    return spec, draw(st.one_of(st.integers(1, 5000), st.integers(1, 1 << 22)))


@settings(max_examples=500)
@given(launches())
def test_groups_and_runs_of_a_launch_are_all_rows_once(case: tuple[KernelSpec, int]) -> None:
    spec, M = case
    launch = plan_launch(spec, M)
    whole, runs = launch.group, launch.partials - launch.group
    in_chunk = CHUNK_ROWS // spec.group_rows
    assert whole % in_chunk == 0 and whole * spec.group_rows <= M
    # Each row behind the whole groups is in a run, and no run is without a row.
    behind, slab = M - whole * spec.group_rows, in_chunk * spec.run_rows
    strips = {row // spec.rows_per_cta % in_chunk for row in range(behind % slab)}
    assert runs == behind // slab * in_chunk + len(strips)
    rounds = M // CHUNK_ROWS * in_chunk // launch.participants
    if spec.leaves == "groups":
        assert behind < CHUNK_ROWS
    elif spec.leaves == "runs" and rounds < 4:
        assert whole == 0
    else:
        missing = rounds * launch.participants - whole
        assert 0 <= missing < in_chunk
    assert launch.participants <= launch.partials  # every CTA has something to do
    assert 1 <= launch.participants <= spec.participants
    assert launch.grid == launch.participants * spec.cluster
    # A row of the workspace for every sum; the second kernel has a CTA for every slice.
    assert launch.scratch == launch.partials * ROW * spec.cluster
    assert launch.zeroed == 0
    second = spec.has_second_kernel
    assert launch.sum_grid == (ROW // 32 * spec.cluster if second else 0)
    assert launch.counters == (0 if second else 64 * spec.cluster)
    assert launch.workspace_bytes == launch.scratch_offset + 4 * launch.scratch


def test_a_cta_keeps_whole_groups_where_there_is_a_full_round_of_them() -> None:
    """Ten CTAs of two teams; a chunk is 8 groups of 512 rows, of 32 runs each."""
    spec = replace(TEN, run_rows=16, group_rows=512, leaves="both", way="second_kernel")
    for M, whole, runs in ((4096, 0, 256), (8192, 8, 256), (8193, 8, 257), (12300, 16, 262)):
        launch = plan_launch(spec, M)
        assert (launch.group, launch.partials) == (whole, whole + runs)
    for leaves, whole, runs in (("groups", 24, 6), ("runs", 0, 774)):
        launch = plan_launch(replace(spec, leaves=leaves), 12300)
        assert (launch.group, launch.partials) == (whole, whole + runs)
    assert plan_launch(replace(spec, leaves="runs"), 3).grid == 2
    assert plan_launch(replace(spec, leaves="groups"), 4096).grid == 8


# ---- Choices of a table --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("M", "N", "how", "file"),
    [
        (4096, 1024, "tuned", "k4096"),
        (4097, 1024, "nearest", "k4096"),
        (129, 1024, "nearest", "k1024"),
        (128, 1024, "fallback", "any1024_16"),
        (1, 1024, "fallback", "any1024_16"),
        (2048, 1024, "nearest", "k1024"),  # 4096 is as far: the smaller one wins
        (16383, 1024, "nearest", "k4096"),
        (20000, 1024, "nearest", "k65536"),
        (10**9, 1024, "nearest", "k65536"),
        (4096, 512, "fallback", "any1024_16"),
        (4096, 2048, "fallback", "any4096_16"),
        (4096, 513, "fallback", "any1024_2"),
        (4096, 1025, "fallback", "any4096_2"),
        (4096, 4104, "none", None),
        (4096, 128, "fallback", "any4096_16"),  # the other one takes no rows that short
    ],
)
def test_choice_by_shape(M: int, N: int, how: str, file: str | None) -> None:
    choice = TABLE.choose(M, N, "bf16", "bf16")
    assert (choice.how, choice.kernel and choice.kernel.file) == (how, file)


def test_few_rows_have_kernels_for_few_rows() -> None:
    """One that was tuned for few, else a fallback kernel, else the nearest there is."""
    few, many = entry(30), entry(4096)
    table = Table(TABLE.target, (few, many), TABLE.fallback)

    def chosen(table: Table, M: int) -> tuple[str, Any]:
        choice = table.choose(M, 1024, "bf16", "bf16")
        return choice.how, choice.kernel and choice.kernel.file

    assert chosen(table, 30) == ("tuned", "k30")
    assert chosen(table, 8) == chosen(table, 128) == ("nearest", "k30")
    assert chosen(table, 7) == ("fallback", "any1024_16"), "a quarter of what it was tuned for"
    near = Table(TABLE.target, (entry(192), many), TABLE.fallback)
    assert chosen(near, 128) == chosen(near, 49) == ("nearest", "k192")
    assert chosen(near, 48) == ("fallback", "any1024_16"), "exactly a quarter"
    without = Table(TABLE.target, (many,), TABLE.fallback)
    assert chosen(without, 3) == ("fallback", "any1024_16")
    reason = without.choose(3, 1024, "bf16", "bf16").reason
    assert reason.startswith("3x1024:bf16 was not tuned, and the nearest M, 4096, is far;")
    alone = Table(TABLE.target, (many,), ())
    assert chosen(alone, 3) == ("nearest", "k4096")
    assert alone.choose(3, 1024, "bf16", "bf16").tuned is many
    unaligned = without.choose(3, 1024, "bf16", "bf16", alignment=8)
    assert unaligned.how == "fallback" and "k4096 needs" in unaligned.reason


def test_choice_depends_on_the_dtypes() -> None:
    assert TABLE.choose(4096, 1024, "bf16", "fp32").how == "none"
    assert TABLE.choose(4096, 1024, "fp16", "fp16").how == "none"


@pytest.mark.parametrize("places", [{"alignment": 8}, {"weight_alignment": 8}])
def test_unaligned_rows_or_weights_get_a_kernel_with_narrow_vectors(places: Any) -> None:
    choice = TABLE.choose(4096, 1024, "bf16", "bf16", **places)
    assert (choice.how, choice.kernel and choice.kernel.file) == ("fallback", "any1024_2")
    assert "k4096 needs" in choice.reason


def test_kernel_that_fits_in_one_round_is_not_nearest_to_one_row_more() -> None:
    """8 rows for each of 132 CTAs: 1056 rows are one round of the grid, 1057 are two."""
    whole, fine = entry(1056, batch_rows=4), entry(2112)
    table = Table(TABLE.target, (whole, fine), ())

    def nearest(M: int) -> int:
        found = table.choose(M, 1024, "bf16", "bf16").tuned
        assert found is not None
        return found.M

    assert [nearest(M) for M in (900, 1056, 1057, 1300)] == [1056, 1056, 2112, 2112]
    assert nearest(2112) == 2112
    alone = Table(TABLE.target, (whole,), ())
    assert alone.choose(1057, 1024, "bf16", "bf16").kernel is whole.kernel


def test_wide_vectors_need_only_16_bytes_of_the_weight() -> None:
    wide = Table(TABLE.target, (entry(4096, vector_bytes=32),), ())
    assert wide.choose(4096, 1024, "bf16", "bf16", weight_alignment=16).how == "tuned"
    assert wide.choose(4096, 1024, "bf16", "bf16", alignment=16).how == "none"


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("sm_90a", (9, 0), True),
        ("sm_90a", (10, 0), False),
        ("sm_100a", (10, 0), True),
        ("sm_100a", (10, 3), False),
        ("sm_103a", (10, 3), True),
        ("sm_120a", (12, 0), True),
        ("sm_80", (8, 6), True),
        ("sm_89", (8, 6), False),
        ("sm_80", (9, 0), False),
    ],
)
def test_code_runs_on(arch: str, capability: tuple[int, int], runs: bool) -> None:
    assert runs_on(arch, capability) is runs
