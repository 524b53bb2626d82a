"""The numbers of a launch, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normforge.spec import CHUNK_ROWS, UNBOUNDED, KernelSpec, plan_launch
from tests.support.fake_driver import SPEC

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
