"""LayerNorm's backward in the emulator: every strategy, against float64, under many schedules."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from generator.emulate import check_variant, find_compiler
from generator.emulate.check import CPU, check_source, small_launch
from generator.emulate.run import CallOptions
from generator.kernels.render import render
from generator.operations import LAYERNORM_BACKWARD
from generator.problem import Problem
from generator.target import Target
from normforge.launch.kernel_arguments import DW_ADDED, DW_IN_FP32
from tests.support.emulator import WITHOUT_DW, WITHOUT_DX, run_to_one_result, small_variant
from tests.support.samples import DETERMINISTIC, in_turn, sample_variant

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

SHAPE = "layernorm_backward:42x1024:bf16"
SEED = 2026


PIPELINES: list[dict[str, int | str]] = [
    {"pipeline": "direct"},
    {"pipeline": "bulk", "stages": 2, "rows_in_flight": 2},
    {"pipeline": "async", "stages": 2, "reload": "smem", "weight_in": "smem"},
]


@pytest.mark.parametrize(("reduction", "knobs"), in_turn(DETERMINISTIC, inner=PIPELINES))
def test_deterministic_reduction_gives_one_set_of_right_bits(
    reduction: str, knobs: dict[str, int | str], target: Target
) -> None:
    variant, problem = small_variant(SHAPE, reduction, target, **knobs), Problem.parse(SHAPE)
    check = check_variant(variant, problem, schedules=40, seed=SEED, all_rows=True)
    assert check.problems == ()
    assert (check.schedules, check.distinct_results) == (40, 1)


@pytest.mark.parametrize("reduction", ["atomic", "bulk_free"])
def test_free_running_reduction_is_told_apart(reduction: str, target: Target) -> None:
    variant, problem = small_variant(SHAPE, reduction, target), Problem.parse(SHAPE)
    check = check_variant(variant, problem, schedules=60, seed=SEED, all_rows=True)
    assert check.problems == ()
    assert check.distinct_results > 1
    spec, launch = small_launch(variant, problem.M)
    claim = replace(spec, determinism="gpu_to_gpu")
    caught = check_source(render(variant), claim, launch, problem, schedules=60, seed=SEED)
    assert caught.problems


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        # No mean(w * dy).
        ("__fmul_rn(scale[u], __fmul_rn(sum[u], inverse_columns))", "0.0f", r"dx\[.* are off"),
        # A row sum of one warp alone.
        ("value[u] = warp_sum(value[u]);", "", r"dx\[.* are off"),
        ("words, i), -mean[u]);", "words, i), 0.0f);", r"dx\[.* are off"),
        ("partial[kVectors + j][i] = __fadd_rn(dy,", "__fadd_rn(dy,", r"dw\[1024\] .* are off"),
        ("place + columns / 2", "place", "which nobody has written"),
    ],
)
def test_planted_wrong_kernel_is_caught(old: str, new: str, found: str, target: Target) -> None:
    variant, problem = small_variant(SHAPE, "column_slices", target), Problem.parse(SHAPE)
    source = render(variant)
    assert old in source
    spec, launch = small_launch(variant, problem.M)
    check = check_source(source.replace(old, new), spec, launch, problem, schedules=3)
    assert any(re.search(found, problem) for problem in check.problems), check.problems


@pytest.mark.sampled(3)
@pytest.mark.parametrize("reduction", DETERMINISTIC)
def test_what_a_call_asks_for_has_the_bits_of_a_plain_call(reduction: str, target: Target) -> None:
    variant = small_variant(SHAPE, reduction, target)
    inputs = LAYERNORM_BACKWARD.make_inputs(Problem.parse(SHAPE), CPU)
    plain = run_to_one_result(variant, inputs)
    assert plain["dw"].shape == (2048,)
    assert torch.equal(run_to_one_result(variant, inputs, WITHOUT_DW)["dx"], plain["dx"])
    assert torch.equal(run_to_one_result(variant, inputs, WITHOUT_DX)["dw"], plain["dw"])
    wide = run_to_one_result(variant, inputs, CallOptions(dw_mode=DW_IN_FP32))["dw"]
    assert torch.equal(wide.to(torch.bfloat16), plain["dw"])
    start = torch.linspace(-3, 5, 2048)
    added = run_to_one_result(variant, inputs, CallOptions(dw_mode=DW_ADDED, added_to=start))["dw"]
    assert torch.equal(added, start + wide)
    packed = run_to_one_result(variant, inputs, CallOptions(inner=7))
    assert torch.equal(packed["dx"], plain["dx"])
    assert torch.equal(packed["dw"], plain["dw"])


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("shape", "knobs"),
    [
        ("203x1024:fp32", {"strategy": "last_cta"}),
        ("203x1001:bf16", {"strategy": "column_slices"}),  # dbeta begins at an odd place
        ("203x770:fp16:fp32", {"strategy": "mailbox"}),
        ("203x1002:bf16", {"strategy": "semaphore"}),
        ("9x1:fp32", {"strategy": "separate"}),
        ("300x64:bf16", {"strategy": "mailbox", "threads_per_row": 8}),
        ("203x1024:bf16+offset+residual_fp32", {"strategy": "column_slices"}),
        ("203x1024:fp16:fp32+residual", {"strategy": "bulk_reduce"}),
        ("97x8192:bf16", {"strategy": "column_slices", "cluster": 2}),
        ("97x8192:bf16", {"strategy": "mailbox", "cluster": 4, "arrival": "early"}),
        ("97x8192:fp32", {"strategy": "atomic", "cluster": 4}),
    ],
)
def test_shapes_dtypes_options_and_clusters(
    shape: str, knobs: dict[str, int | str], target: Target
) -> None:
    problem = Problem.parse(f"layernorm_backward:{shape}")
    variant = sample_variant(problem, target, SEED, **knobs)
    check = check_variant(variant, problem, schedules=8, seed=SEED)
    assert check.problems == ()
    assert check.schedules == 8
