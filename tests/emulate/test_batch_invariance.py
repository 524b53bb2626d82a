"""Bits that do not depend on the batch: kernels of one width in the emulator, against each other
and against the order of additions that docs/determinism.md states."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from generator.emulate.build import find_compiler
from generator.emulate.check import small_launch
from generator.emulate.run import CallOptions, Layout, Schedule, run_schedules
from generator.kernels.knobs import KNOBS
from generator.kernels.render import render
from generator.kernels.variant import Variant, make_variant
from generator.operations.rmsnorm_backward import Inputs
from generator.paths import REPOSITORY
from generator.problem import Problem
from generator.space.load import load_space, space_file
from generator.target import find_target
from normforge.launch.kernel_arguments import DW_ADDED, DW_IN_FP32
from normforge.spec import CHUNK_ROWS, plan_launch
from tests.support.emulator import cancelling_inputs

OPERATION = "rmsnorm_invariant_backward"
SPACE = load_space(space_file(OPERATION))
H200 = find_target("h200")
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")


@cache
def stated_order() -> Callable[..., torch.Tensor]:
    """`dw_in_order` as docs/determinism.md has it."""
    text = (REPOSITORY / "docs" / "determinism.md").read_text()
    code = next(
        c for c in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "dw_in_order" in c
    )
    names: dict[str, Callable[..., torch.Tensor]] = {}
    exec(code, names)
    return names["dw_in_order"]


def some(inputs: Inputs, start: int, stop: int) -> Inputs:
    part = slice(start, stop)
    return replace(inputs, x=inputs.x[part], dy=inputs.dy[part], rstd=inputs.rstd[part])


def draw(problem: Problem, seed: int, **fixed: int | str) -> Variant:
    return make_variant(SPACE.sample(problem, H200, random.Random(seed), fixed), problem)


def run(
    variant: Variant,
    inputs: Inputs,
    participants: int,
    *,
    seed: int = 0,
    pad: int = 0,
    added_to: torch.Tensor | None = None,
    source: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    """dx, and dw in fp32, of a launch with so many CTAs or clusters at most."""
    spec, launch = small_launch(variant, len(inputs.x), participants)
    mode = DW_IN_FP32 if added_to is None else DW_ADDED
    runs = run_schedules(
        source or render(variant),
        spec,
        launch,
        inputs,
        [Schedule(seed, launch.grid)],
        layout=Layout((pad, 2 * pad, pad)),
        call_options=CallOptions(dw_mode=mode, added_to=added_to),
    )
    assert runs.faults == []
    return runs.results["dx"][0], runs.results["dw"][0]


def order_of(variant: Variant) -> dict[str, int]:
    return {
        "chunk_rows": CHUNK_ROWS,
        "group_rows": variant.group_rows,
        "run_rows": variant.run_rows,
        "teams": variant.teams,
        "abreast": variant.rows_abreast,
    }


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    shape=st.sampled_from(
        ((64, "bf16"), (128, "fp16"), (256, "bf16"), (1024, "bf16"), (1024, "fp32"))
    ),
    rows=st.integers(1, 2600),
    seeds=st.tuples(*[st.integers(0, 10**6)] * 2),
    participants=st.tuples(*[st.integers(1, 9)] * 2),
    pad=st.sampled_from((0, 16)),
)
def test_bits_follow_from_the_rows_alone(
    shape: tuple[int, str],
    rows: int,
    seeds: tuple[int, int],
    participants: tuple[int, int],
    pad: int,
) -> None:
    """Any two kernels of a width, with any grids, strides and numbers of rows."""
    N, dtype = shape
    M = max(rows, 96 if N == 64 else 64)
    problem = Problem(M, N, dtype, dtype, operation=OPERATION)
    inputs = cancelling_inputs(problem)
    first, second = (draw(problem, seed) for seed in seeds)
    dx, dw = run(first, inputs, participants[0])
    other_dx, other_dw = run(second, inputs, participants[1], seed=1, pad=pad)
    assert torch.equal(dx, other_dx)
    assert torch.equal(dw, other_dw)
    stated = stated_order()(inputs.x, inputs.dy, inputs.rstd, **order_of(first))
    assert torch.equal(dw, stated)

    start = seeds[0] % M
    stop = min(M, start + 1 + seeds[1] % 300)
    if stop - start >= 32:
        part_dx, _ = run(second, some(inputs, start, stop), participants[0])
        assert torch.equal(part_dx, dx[start:stop])


@pytest.mark.parametrize("strategy", ["separate", "column_slices"])
@pytest.mark.parametrize("leaves", ["groups", "runs", "both"])
@pytest.mark.parametrize("rows", [1300, 100])
def test_order_is_the_one_that_is_stated(strategy: str, leaves: str, rows: int) -> None:
    """rows: of the last chunk, where 100 are too few for all of its groups."""
    problem = Problem(2 * CHUNK_ROWS + rows, 64, "bf16", "bf16", operation=OPERATION)
    inputs = cancelling_inputs(problem)
    # Wide slices, so that the last chunk takes a step of its own.
    variant = draw(problem, 3, strategy=strategy, leaves=leaves, slice_columns=64)
    _, dw = run(variant, inputs, 4)
    assert torch.equal(dw, stated_order()(inputs.x, inputs.dy, inputs.rstd, **order_of(variant)))


@pytest.mark.parametrize("shape", [(8192, "bf16"), (3072, "bf16")])
def test_clusters_and_odd_teams_as_well(shape: tuple[int, str]) -> None:
    N, dtype = shape
    problem = Problem(200, N, dtype, dtype, operation=OPERATION)
    inputs = cancelling_inputs(problem)
    results = [run(draw(problem, seed), inputs, 1 + seed) for seed in range(3)]
    for dx, dw in results[1:]:
        assert torch.equal(dx, results[0][0])
        assert torch.equal(dw, results[0][1])


@pytest.mark.parametrize("slice_columns", [32, 128, 256])
def test_rounds_of_the_sum_are_whole_chunks(slice_columns: int) -> None:
    """192 threads, three times a power of two, over several chunks. As for rows of 3072, which take
    twice as many, with a quarter of the columns."""
    wide = Problem(CHUNK_ROWS + 300, 3072, "bf16", "bf16", operation=OPERATION)
    problem = replace(wide, N=768)
    inputs = cancelling_inputs(problem)
    wanted = {"strategy": "column_slices", "slice_columns": slice_columns, "rows_per_cta": 2}
    drawn = draw(wide, 1, leaves="groups", rows_in_flight=1, **wanted)
    variant = make_variant({**drawn.config, "threads_per_row": 96}, problem)
    assert (drawn.threads, variant.threads) == (384, 192)
    _, dw = run(variant, inputs, 3)
    assert torch.equal(dw, stated_order()(inputs.x, inputs.dy, inputs.rstd, **order_of(variant)))


@pytest.mark.parametrize("strategy", ["separate", "column_slices"])
@pytest.mark.parametrize("slice_columns", [4, 8, 16, 32, 64, 68, 124, 128, 260])
def test_slices_of_every_kind_of_width_add_in_the_order_that_is_stated(
    strategy: str, slice_columns: int
) -> None:
    problem = Problem(520, 256, "bf16", "bf16", operation=OPERATION)
    assert slice_columns in KNOBS["slice_columns"].domain
    variant = draw(problem, 3, strategy=strategy, leaves="runs")
    variant = replace(variant, config={**variant.config, "slice_columns": slice_columns})
    inputs = cancelling_inputs(problem)
    _, dw = run(variant, inputs, 4)
    assert torch.equal(dw, stated_order()(inputs.x, inputs.dy, inputs.rstd, **order_of(variant)))


@pytest.mark.parametrize("strategy", ["separate", "column_slices"])
def test_micro_batches_give_the_bits_of_the_batch(strategy: str) -> None:
    M = 2 * CHUNK_ROWS + 300
    problem = Problem(M, 64, "bf16", "bf16", operation=OPERATION)
    inputs = cancelling_inputs(problem)
    variant = draw(problem, 5, strategy=strategy)
    _, whole = run(variant, inputs, 5)
    for cuts in ((0, CHUNK_ROWS, M), (0, 2 * CHUNK_ROWS, M), (0, CHUNK_ROWS, 2 * CHUNK_ROWS, M)):
        total = torch.zeros(64)
        for start, stop in pairwise(cuts):
            _, total = run(variant, some(inputs, start, stop), 3, added_to=total)
        assert torch.equal(total, whole)
    # Cut elsewhere, it is another order: the test would see it.
    total = torch.zeros(64)
    for start, stop in ((0, 1000), (1000, M)):
        _, total = run(variant, some(inputs, start, stop), 3, added_to=total)
    assert not torch.equal(total, whole)


@pytest.mark.parametrize("strategy", ["separate", "column_slices"])
def test_margins_of_sms_leave_every_bit(strategy: str) -> None:
    M = CHUNK_ROWS + 700
    problem = Problem(M, 64, "bf16", "bf16", operation=OPERATION)
    inputs = cancelling_inputs(problem)
    variant = draw(problem, 5, strategy=strategy, ctas_per_sm=1)
    dx, dw = run(variant, inputs, 12)
    grids = set()
    for margin in (1, 5, 11):
        spec = variant.spec(12 - margin)
        grids.add(plan_launch(spec, M).grid)
        other_dx, other_dw = run(variant, inputs, spec.participants, seed=margin)
        assert torch.equal(dx, other_dx) and torch.equal(dw, other_dw)
    assert len(grids) == 3


def test_sign_of_zero_does_not_depend_on_the_kernel() -> None:
    """Products that underflow to -0.0, added to -0.0, by kernels that do and do not work on rows
    behind the last one, which count as 0.0."""
    M = CHUNK_ROWS - 1024
    problem = Problem(M, 64, "bf16", "bf16", operation=OPERATION)
    x = torch.full((M, 64), 1e-30, dtype=torch.bfloat16)
    inputs = replace(cancelling_inputs(problem), x=x, dy=-x, rstd=torch.ones(M))
    signs = []
    for rows_in_flight in (1, 2):
        variant = draw(problem, 3, rows_in_flight=rows_in_flight)
        _, dw = run(variant, inputs, 4, added_to=torch.full((64,), -0.0))
        assert not dw.any()
        signs.append(dw.signbit())
    assert torch.equal(*signs)


def test_gpus_without_mbarriers_give_the_same_bits() -> None:
    problem = Problem(CHUNK_ROWS + 700, 128, "bf16", "bf16", operation=OPERATION)
    inputs = cancelling_inputs(problem)
    variant = draw(problem, 3, pipeline="async")
    source = render(variant)
    newer = "#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900"
    assert source.count(newer) == 1
    _, dw = run(variant, inputs, 3)
    _, older = run(variant, inputs, 3, source=source.replace(newer, "#if 1"))
    assert torch.equal(dw, older)


PLANTED = {
    "groups far apart are added before neighbours": (
        "for (int n = 1; n < Shape::kAbreast; n *= 2)",
        "for (int n = Shape::kAbreast / 2; n > 0; n /= 2)",
    ),
    "runs between the first and the last are left out": (
        "if (!first) sum = plus(load_shared4(total(quad)), sum);",
        "if (!first && last) sum = plus(load_shared4(total(quad)), sum);",
    ),
    "teams are added in another order": (
        "load_shared4(place(runs - 1, quad, team))",
        "load_shared4(place(runs - 1, quad, team * 3 % kTeams))",
    ),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_planted_violation_is_seen(planted: str) -> None:
    problem = Problem(2 * CHUNK_ROWS + 300, 128, "bf16", "bf16", operation=OPERATION)
    inputs = cancelling_inputs(problem)
    variant = draw(problem, 3, strategy="separate", leaves="groups", slice_columns=16)
    stated = stated_order()(inputs.x, inputs.dy, inputs.rstd, **order_of(variant))
    old, new = PLANTED[planted]
    source = render(variant)
    assert source.count(old) == 1
    _, dw = run(variant, inputs, 3, source=source.replace(old, new))
    assert not torch.equal(dw, stated)
