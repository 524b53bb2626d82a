"""The numbers of a launch, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from generator.runtime.spec import KernelSpec, plan_launch
from tests.support.fake_driver import SPEC

ROW = 1024  # floats of one row of partial dw
TEN = replace(  # ten CTAs of two teams, whose batches have four rows
    SPEC,
    **{"sms": 5, "ctas_per_sm": 2, "cluster": 1, "rows_per_cta": 2, "rows_in_flight": 4},
    **{"columns": ROW, "partial_stride": ROW, "slice_columns": 32, "levels": 1},
    **{"accumulates": False, "turns": False, "even_grid": False},
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


def memory(spec: KernelSpec, M: int = 8000) -> tuple[int, int, int, int]:
    launch = plan_launch(spec, M)
    return launch.group, launch.counters, launch.zeroed, launch.scratch


def test_every_strategy_has_the_memory_that_it_uses() -> None:
    two = {"levels": 2}
    assert memory(replace(TEN, strategy="separate")) == (10, 0, 0, 10 * ROW)
    assert memory(replace(TEN, strategy="last_cta")) == (10, 2, 0, 10 * ROW)
    # Ten participants are three groups of four, the last one ragged, with a sum each.
    assert memory(replace(TEN, strategy="last_cta", **two)) == (4, 4, 0, 13 * ROW)
    assert memory(replace(TEN, strategy="semaphore", turns=True)) == (10, 3, 0, ROW)
    assert memory(replace(TEN, strategy="semaphore", turns=True, **two)) == (4, 5, 0, 3 * ROW)
    # A ledger of two words and one for each of 32 slices, in whole lines of 32 words.
    assert memory(replace(TEN, strategy="column_slices")) == (10, 64, 0, 10 * ROW)
    assert memory(replace(TEN, strategy="mailbox")) == (10, 64, 10 * ROW, 0)
    assert memory(replace(TEN, strategy="atomic", accumulates=True)) == (10, 1, ROW, 0)


def test_regions_of_the_workspace_follow_each_other_in_whole_lines() -> None:
    launch = plan_launch(replace(TEN, strategy="mailbox"), 8000)
    assert launch.zeroed_offset == 64 * 4
    assert launch.scratch_offset == 64 * 4 + 10 * ROW * 4
    launch = plan_launch(replace(TEN, strategy="last_cta"), 8000)
    assert (launch.zeroed_offset, launch.scratch_offset) == (128, 128)
    assert launch.workspace_bytes == 128 + 10 * ROW * 4
