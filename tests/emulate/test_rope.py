"""The rotary embedding alone in the emulator: an operation without sums, over a row or over the
rows. Every pipeline and way to a partner against float64, and what its barriers are for."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from generator.emulate import check_variant, find_compiler
from generator.emulate.check import CPU, check_source, small_launch
from generator.kernels.render import render
from generator.operations import OPERATIONS
from generator.problem import Problem
from generator.target import Target
from tests.support.emulator import run_to_one_result, small
from tests.support.rotated import fault_of, of_heads
from tests.support.samples import space_of

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

NAME = "rope"
PIPELINES: dict[str, dict[str, Any]] = {
    "direct": {"pipeline": "direct", "grid": "rows"},
    "walking": {"pipeline": "direct", "grid": "full", "rows_in_flight": 2},
    "async": {"pipeline": "async", "grid": "even", "stages": 2},
    "bulk": {"pipeline": "bulk", "grid": "full", "stages": 2, "rows_in_flight": 2},
    "producer": {"pipeline": "producer", "grid": "full", "stages": 2},
}
ROTATIONS = ["", "+interleaved", "+rotary512", "+rotary512+interleaved"]


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_schedule_gives_one_set_of_right_bits(
    pipeline: str, rotation: str, target: Target
) -> None:
    problem = Problem.parse(f"42x1024:bf16{rotation}", NAME)
    variant = small(problem, target, **PIPELINES[pipeline])
    check = check_variant(variant, problem, schedules=5, seed=2026, all_rows=True)
    assert check.problems == ()
    assert (check.distinct_results, check.errors.keys()) == (1, {"y"})


@pytest.mark.parametrize(
    ("shape", "threads_per_row"),
    [
        *(("203x128:bf16", threads) for threads in (8, 16, 32)),
        ("192x128:bf16", 8),  # batches of one group
        ("61x64:fp16", 8),
        ("97x96:bf16", 16),
        ("45x96:fp32", 8),
        *(("77x256:bf16+rotary64", threads) for threads in (8, 16, 32)),
        ("45x65:bf16+rotary64", 32),
        *(("77x256:bf16+rotary64+interleaved", threads) for threads in (8, 32)),
        ("61x34:bf16+rotary14+interleaved", 8),
        # Rows that lie across warps, of which each thread has both columns of every pair.
        ("203x96:bf16", 6),
        ("192x96:bf16", 6),  # batches of one group
        ("77x80:fp16", 5),
        ("45x96:fp32", 12),
        ("61x112:bf16", 7),
        ("77x160:bf16+interleaved", 10),
        ("45x192:bf16+rotary96", 6),
        ("77x224:bf16", 14),
    ],
)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_heads_are_rotated_and_back(
    sign: float, shape: str, threads_per_row: int, target: Target
) -> None:
    """Partners are a thread's own, a shuffle away, or read again. The backward has the sign -1."""
    problem = Problem.parse(shape, NAME)
    inputs = replace(OPERATIONS[NAME].make_inputs(problem, CPU), sign=sign)
    variant = of_heads(problem, target, threads_per_row)
    assert fault_of(variant, problem, inputs) == ""
    if sign < 0:
        found, forth = (
            run_to_one_result(variant, given) for given in (inputs, replace(inputs, sign=1.0))
        )
        assert not torch.equal(found["y"], forth["y"])


PLANTED = [
    ("direct", "-element<Element>(partner", "element<Element>(partner", r"y\[.* are off"),
    ("direct", "(rows.column(j) < kHalf) ?", "true ?", r"y\[.* are off"),
    ("direct", "(args.sign, ", "(1.0f, ", r"y\[.* are off"),
    ("async", "(cos_words[rows", "(sin_words[rows", r"y\[.* are off"),
    ("bulk", "team_barrier();  // in the place", "// in the place", "race: refills byte"),
]


@pytest.mark.parametrize(("pipeline", "old", "new", "found"), PLANTED)
def test_planted_wrong_kernel_is_caught(
    pipeline: str, old: str, new: str, found: str, target: Target
) -> None:
    problem = Problem.parse("90x2048:bf16", NAME)
    variant = small(problem, target, threads_per_row=256, **PIPELINES[pipeline])
    source = render(variant)
    assert old in source
    spec, launch = small_launch(variant, problem.M)
    check = check_source(source.replace(old, new), spec, launch, problem, schedules=20)
    assert any(re.search(found, said) for said in check.problems), check.problems


def test_rows_without_sums_are_neither_shared_by_ctas_nor_read_again(target: Target) -> None:
    space = space_of(NAME)
    values = {knob.name: knob.values for knob in space.knobs}
    assert (values["cluster"], values["reload"]) == ((1,), ("none",))
    source = render(of_heads(Problem.parse("70x128:bf16", NAME), target, 8))
    assert not re.search(r"RowSum|sum\[|inverse_columns", source)
