"""Rows of less than a warp on the CPU: several lie side by side in each."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from generator.emulate import Schedule, check_variant, find_compiler, run_schedules
from generator.emulate.check import CPU, small_launch
from generator.emulate.run import CallOptions
from generator.kernels.render import render
from generator.kernels.variant import Variant
from generator.operations.rmsnorm_backward import make_inputs
from generator.paths import REPOSITORY
from generator.problem import Problem
from generator.target import Target, find_target
from tests.support.emulator import WITHOUT_DW, WITHOUT_DX
from tests.support.samples import DETERMINISTIC, REDUCTION, drawn_variant, plain_variant

SEED = int(os.environ.get("NORMFORGE_EMULATE_SEED", "2026"))
"""The seed of the sampled variants; every test id shows it."""
ROOT = REPOSITORY

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
pytestmark = needs_compiler


SHORT = (
    "77x64:bf16",
    "300x128:fp16:fp32",
    "157x256:bf16",
    "155x64:fp32",
    "211x100:bf16",
    "97x64:bf16+offset+residual",
    "155x128:fp16+residual_fp32",
    "41x8:bf16",
)
"""Numbers of rows that are no multiple of a batch; widths with and without idle threads."""


def short_variant(shape: str, reduction: str, pipeline: str, per_row: int, index: int) -> Variant:
    """A variant with `per_row` threads per row, or with 8 where those would be mostly idle."""
    problem = replace(Problem.parse(shape), M=1 << 16)
    target = find_target("gb200" if index % 2 and pipeline == "direct" else "h200")
    knobs = {**REDUCTION[reduction], "pipeline": pipeline}
    drawn = (
        drawn_variant(problem, target, SEED + index, **{**knobs, "threads_per_row": threads})
        for threads in (per_row, 8)
    )
    return next(filter(None, drawn))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("pipeline", ["direct", "async"])
@pytest.mark.parametrize("reduction", REDUCTION)
def test_rows_of_less_than_a_warp(reduction: str, pipeline: str) -> None:
    first = list(REDUCTION).index(reduction) + 4 * (pipeline == "async")
    for index in range(first, first + 2):
        shape = SHORT[index % len(SHORT)]
        variant = short_variant(shape, reduction, pipeline, (8, 16)[index // 2 % 2], index)
        for rows in (None, 1, variant.batch_rows - 1):
            problem = Problem.parse(shape)
            problem = replace(problem, M=rows or problem.M)
            check = check_variant(variant, problem, schedules=6, seed=index)
            assert check.problems == (), dict(variant.config)
            if variant.determinism != "none":
                assert check.distinct_results == 1


@pytest.mark.parametrize("reduction", DETERMINISTIC)
def test_rows_of_less_than_a_warp_give_one_set_of_bits(reduction: str, target: Target) -> None:
    knobs = {**REDUCTION[reduction], "threads_per_row": 8, "rows_per_cta": 2, "rows_in_flight": 2}
    if reduction == "separate":
        knobs["sum_threads"] = 128
    variant = plain_variant("65536x64:bf16", target, **knobs, ctas_per_sm=4)
    problem = Problem.parse("131x64:bf16")
    assert small_launch(variant, problem.M)[1].grid == 5
    check = check_variant(variant, problem, schedules=100, seed=SEED, all_rows=True)
    assert check.problems == ()
    assert (check.schedules, check.distinct_results) == (100, 1)


def test_rows_of_less_than_a_warp_of_packed_heads(target: Target) -> None:
    """Heads of 64 columns in a packed tensor, where rows that lie side by side in a warp may belong
    to two tokens, without dx and without dw: the bits of a plain call."""
    problem = Problem.parse("210x64:bf16")
    knobs = {"threads_per_row": 8, "rows_per_cta": 2, "rows_in_flight": 2, "ctas_per_sm": 4}
    variant = plain_variant(replace(problem, M=1 << 16), target, **knobs, strategy="last_cta")
    spec, launch = small_launch(variant, problem.M)
    inputs = make_inputs(problem, CPU)

    def call(call_options: CallOptions) -> dict[str, torch.Tensor]:
        schedules = [Schedule(seed, launch.grid) for seed in range(3)]
        runs = run_schedules(
            render(variant), spec, launch, inputs, schedules, call_options=call_options
        )
        assert runs.faults == []
        assert runs.distinct_results == 1
        return {name: result for name, (result,) in runs.results.items()}

    plain = call(CallOptions())
    for inner in (3, 7, 21):
        packed = call(CallOptions(inner=inner))
        assert torch.equal(packed["dx"], plain["dx"])
        assert torch.equal(packed["dw"], plain["dw"])
    assert torch.equal(call(WITHOUT_DW)["dx"], plain["dx"])
    assert torch.equal(call(WITHOUT_DX)["dw"], plain["dw"])


def test_short_samples_cover_their_knobs() -> None:
    variants = [
        short_variant(
            SHORT[index % len(SHORT)], reduction, pipeline, (8, 16)[index // 2 % 2], index
        )
        for number, reduction in enumerate(REDUCTION)
        for pipeline in ("direct", "async")
        for first in (number + 4 * (pipeline == "async"),)
        for index in range(first, first + 2)
    ]
    assert {v["threads_per_row"] for v in variants} == {8, 16}
    assert {v["rows_in_flight"] for v in variants} == {1, 2, 4}
    assert {v["reload"] for v in variants} == {"none", "smem"}
    assert {v["weight_in"] for v in variants} == {"registers", "smem"}
    assert {v.residual for v in variants} == {"", "bf16", "fp32"}
    assert len({v.vectors for v in variants}) > 2
