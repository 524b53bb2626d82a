"""Kernels for rows that are no whole vectors, in whole vectors all the same: right under every
schedule and for every number of rows, and wrong where a bug is planted."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from generator.emulate import find_compiler
from generator.emulate.check import CPU, Check, check_source, check_variant, small_launch
from generator.emulate.run import CallOptions, Layout, Schedule, run_schedules
from generator.errors import NormforgeError
from generator.kernels.render import render
from generator.kernels.variant import Variant, make_variant
from generator.operations.rmsnorm_backward import make_inputs
from generator.problem import Problem
from generator.space.legal_configs import LegalConfigs
from generator.space.load import load_space
from normforge.spec import plan_launch
from tests.support.emulator import WITHOUT_DW, WITHOUT_DX
from tests.support.forward import H200
from tests.support.samples import DETERMINISTIC, REDUCTION

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

SPACE = load_space()
SHAPES = (
    *("70x4095:bf16", "70x4094:bf16", "150x2047:fp16", "200x1023:bf16", "70x5001:bf16"),
    *("300x33:bf16", "200x1023:fp32", "150x2047:bf16:fp32+offset", "200x1022:fp16+offset"),
)


@cache
def shifted(shape: str, seed: int = 0) -> Variant:
    """A random legal kernel of this shape that has 16-byte vectors."""
    problem, rng = Problem.parse(shape), random.Random(f"{shape} {seed}")
    legal = LegalConfigs(SPACE, problem, H200)
    while True:
        config = legal.draw(rng, ())
        assert config is not None
        if config["vector_bytes"] == 16:
            return make_variant(config, problem)


def example(shape: str = "9999x1023:bf16", reduction: str = "separate", **knobs: Any) -> Variant:
    """A small kernel, which need not be legal for so few rows as are run."""
    small = {"slice_columns": 128, "sum_threads": 128} if reduction == "separate" else {}
    rows = {"pipeline": "producer", "vector_bytes": 16, "stages": 3, "reload": "none"}
    rows |= {"row_numbers": "next", "ctas_per_sm": 1}
    teams = {"threads_per_row": 96, "rows_per_cta": 2, "grid": "full", "spare_sms": 0}
    problem = Problem.parse(shape)
    fixed = {**REDUCTION[reduction], **small, **rows, **teams, **knobs}
    config = {**shifted(shape).config, **fixed}
    return make_variant(SPACE.normalize(config, problem, H200), problem)


@pytest.mark.parametrize("shape", SHAPES)
def test_random_kernels_are_right_under_every_schedule(shape: str) -> None:
    for seed in range(2):
        variant = shifted(shape, seed)
        assert variant.shifted
        check = check_variant(variant, Problem.parse(shape), schedules=4)
        assert check.passed, (variant, check.problems)


@pytest.mark.parametrize("reduction", REDUCTION)
def test_every_strategy_is_right(reduction: str) -> None:
    for teams in (1, 2):
        variant = example(reduction=reduction, rows_per_cta=teams)
        check = check_variant(variant, Problem.parse("90x1023:bf16"), schedules=6)
        assert check.passed, (variant, check.problems)
        assert check.distinct_results == 1 or reduction not in DETERMINISTIC


def check(
    variant: Variant, M: int, source: str = "", participants: int = 5, **change: Any
) -> Check:
    problem = replace(Problem.parse("1x1023:bf16" + "+offset" * variant.offset), M=M)
    spec, launch = small_launch(variant, M, participants)
    text = source or render(variant)
    return check_source(text, spec, replace(launch, **change), problem, schedules=6)


@pytest.mark.parametrize("M", [1, 2, 3, 7, 8, 9, 10, 11, 16, 17, 18, 33])
def test_any_number_of_rows_is_right(M: int) -> None:
    """Fewer than the grid has teams, as many, and one more."""
    for grid in ("full", "even"):
        found = check(example(grid=grid), M, participants=6)
        assert found.passed, found.problems


@pytest.mark.parametrize("options", [WITHOUT_DX, WITHOUT_DW, CallOptions(columns=False)])
def test_outputs_and_the_weight_may_be_left_out(options: CallOptions) -> None:
    variant = example()
    inputs = make_inputs(Problem.parse("67x1023:bf16"), CPU)
    spec, launch = small_launch(variant, 67)
    schedules = [Schedule(seed, launch.grid) for seed in range(3)]
    source = render(variant)
    plain = inputs if options.columns else replace(inputs, weight=torch.ones_like(inputs.weight))
    both = run_schedules(source, spec, launch, plain, schedules)
    some = run_schedules(source, spec, launch, inputs, schedules, call_options=options)
    assert not both.faults and not some.faults
    assert len(some.results) == 2 - len(options.without)
    for name, (result,) in some.results.items():
        assert torch.equal(result, both.results[name][0])


@pytest.mark.parametrize("layout", [Layout((1,)), Layout(misaligned_bytes=2)])
def test_other_rows_are_not_for_these_kernels(layout: Layout) -> None:
    """The emulator says so; that they get other kernels is in tests/runtime."""
    variant = example()
    inputs = make_inputs(Problem.parse("67x1023:bf16"), CPU)
    spec, launch = small_launch(variant, 67)
    runs = run_schedules(
        render(variant), spec, launch, inputs, [Schedule(0, launch.grid)], layout=layout
    )
    assert any("misaligned" in fault or "out of bounds" in fault for fault in runs.faults)


def test_numbers_that_are_not_finite_stay_in_their_row() -> None:
    variant = example()
    inputs = make_inputs(Problem.parse("67x1023:bf16"), CPU)
    spec, launch = small_launch(variant, 67)
    source, schedules = render(variant), [Schedule(0, launch.grid)]
    (plain,) = run_schedules(source, spec, launch, inputs, schedules).results["dx"]
    x = inputs.x.clone()
    x[33] = torch.inf
    runs = run_schedules(source, spec, launch, replace(inputs, x=x), schedules)
    (dx,) = runs.results["dx"]
    others = torch.arange(67) != 33
    assert not runs.faults and dx[33].isnan().all()
    assert torch.equal(dx[others], plain[others])


BUGS: dict[str, tuple[str, str, str]] = {
    "the mask begins an element late": (
        "column >= 0 && column < kColumns",
        "column > 0 && column < kColumns",
        "was never written|dx",
    ),
    "the mask ends an element late": (
        "column >= 0 && column < kColumns",
        "column >= 0 && column <= kColumns",
        "out of bounds|a second time|outside|dx|dw",
    ),
    "elements of the row before count": (
        "(vector > 0 || column >= 0) && (!at_the_end",
        "(!at_the_end",
        "out of bounds|a second time",
    ),
    "elements of the row behind count": (
        "(!at_the_end || column + kElements <= kColumns)",
        "true",
        "out of bounds|a second time",
    ),
    "what is not the row's goes into the sums": (
        "if (!rows.whole(j, column)) {",
        "if (false) {",
        "dx",
    ),
    "a team has the shift of the next": (
        "shift_of(static_cast<long long>(participant) * kTeams + team)",
        "shift_of(static_cast<long long>(participant) * kTeams + team + 1)",
        "misaligned|out of bounds|dx",
    ),
    "all teams have the shift of the first": (
        "shift_of(static_cast<long long>(participant) * kTeams + team)",
        "shift_of(static_cast<long long>(participant) * kTeams)",
        "misaligned|out of bounds|dx",
    ),
    "the last vector is copied from past the end of the tensor": (
        "(left > 1 ? touched + kElements - 1 : touched)",
        "(touched + kElements - 1)",
        "out of bounds: reads",
    ),
    "the last elements of the tensor are left out": (
        "== rows.count - 1) add_last_elements",
        "== rows.count) add_last_elements",
        "dx|dw|reads|nobody",
    ),
    "one more element is taken for the last of the tensor": (
        "i < end; ++i) {",
        "i <= end; ++i) {",
        "out of bounds: reads",
    ),
    "another thread brings the last elements": (
        "vector % kThreadsPerRow != static_cast<int>(row_thread())",
        "vector % kThreadsPerRow != static_cast<int>(row_thread() ^ 32)",
        "race|dx|dw|reads",
    ),
    "the weight is that of a row without a shift": (
        "load_weight<sizeof(WeightElement)>(weight + column)",
        "load_weight<sizeof(WeightElement)>(weight + (column + rows.shift) % kColumns)",
        "dx",
    ),
    "partial sums are stored a column late": (
        "store_shared(own + column + i, partial[j][i]);",
        "store_shared(own + (column + i + 1) % kColumns, partial[j][i]);",
        "dw",
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_found(name: str) -> None:
    old, new, said = BUGS[name]
    variant = example("9999x1023:bf16+offset")  # by which elements that are 0 count for nothing
    source = render(variant)
    assert source.count(old) == 1, "the template has changed: plant the bug anew"
    found = check(variant, 67, source.replace(old, new))
    assert any(re.search(said, problem) for problem in found.problems), found.problems
    assert check(variant, 67).passed


def test_a_grid_that_is_no_multiple_is_found() -> None:
    """The rows of a team then begin at several places within a vector."""
    variant = example()
    spec, launch = small_launch(variant, 67, 8)
    assert (variant.grid_step, launch.grid) == (4, 8)
    odd = plan_launch(replace(spec, sms=7, exact=False), 67)
    found = check_source(render(variant), spec, odd, Problem.parse("67x1023:bf16"), schedules=2)
    assert odd.grid == 7 and not found.passed


@pytest.mark.parametrize(
    "knobs",
    [
        *({"pipeline": "async"}, {"pipeline": "bulk"}, {"pipeline": "direct"}, {"cluster": 3}),
        *({"rows_in_flight": 2}, {"weight_in": "smem"}, {"vector_bytes": 8}),
    ],
)
def test_kernels_that_there_cannot_be(knobs: dict[str, Any]) -> None:
    variant = example()
    with pytest.raises(NormforgeError, match="no kernel has rows that are no whole vectors"):
        make_variant({**variant.config, **knobs}, Problem.parse("67x1023:bf16"))


@pytest.mark.parametrize("shape", ["67x1023:bf16+residual", "layernorm_backward:67x1023:bf16"])
def test_options_and_operations_that_have_none_say_so(shape: str) -> None:
    problem, config = Problem.parse(shape), example().config
    with pytest.raises(NormforgeError, match="no kernel has rows that are no whole vectors"):
        make_variant(config, problem)
    said = SPACE.reject(SPACE.normalize(config, problem, H200), problem, H200)
    assert said is not None and "without residual and clusters, a producer serves" in str(said)


def test_a_gpu_with_too_few_ctas_says_so() -> None:
    variant = example(rows_per_cta=1)
    assert variant.grid_step == 8
    with pytest.raises(NormforgeError, match="needs 8 CTAs at once, and 7 fit"):
        variant.spec(7)
