"""The contract of all operations of the row kernel but RMSNorm's backward (test_emulate.py), in the
emulator: against float64, under many schedules, with the pipelines, strategies and launches that
their spaces have."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from generator.emulate import check_variant, find_compiler
from generator.emulate.check import CPU, check_source, small_launch
from generator.emulate.run import CallOptions
from generator.evaluate.verify.accuracy import compare_all
from generator.kernels.render import render
from generator.kernels.variant import Variant
from generator.operations import OPERATIONS, RMSNORM_BACKWARD, RMSNORM_INVARIANT_BACKWARD
from generator.problem import Problem
from generator.target import Target, find_target
from normforge import operations as library
from normforge.launch.kernel_arguments import DW_ADDED, DW_IN_FP32
from tests.support.emulator import legal, run_to_one_result, small, small_variant
from tests.support.rotated import fitting
from tests.support.samples import DETERMINISTIC, in_turn

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

OWN_TESTS = (RMSNORM_BACKWARD.name, RMSNORM_INVARIANT_BACKWARD.name)
NAMES = [name for name in library.OPERATIONS if name not in OWN_TESTS]
BACKWARDS = [name for name in NAMES if OPERATIONS[name].sums_rows]
FORWARDS = [name for name in NAMES if not OPERATIONS[name].sums_rows]
of_name = pytest.mark.parametrize("name", NAMES)
SEED = 2026


def is_legal(name: str, shape: str, **knobs: Any) -> bool:
    return isinstance(legal(Problem.parse(shape, name), find_target("h200"), **knobs), Variant)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


# ---- Bits and accuracy ---------------------------------------------------------------------------

NUMBERS = {n: [t.name for t in library.signature_of(n).numbers] for n in NAMES}
OF_FORWARDS: dict[str, dict[str, Any]] = {
    "direct": {"pipeline": "direct", "grid": "rows"},
    "walking": {"pipeline": "direct", "grid": "full", "rows_in_flight": 2},
    "bulk": {"pipeline": "bulk", "grid": "full", "stages": 2, "rows_in_flight": 2},
    "async": {"pipeline": "async", "grid": "even", "stages": 2},
    "producer": {"pipeline": "producer", "grid": "full", "stages": 3},
    "read again": {"pipeline": "async", "grid": "full", "stages": 2, "reload": "smem"},
}
OF_BACKWARDS: dict[str, dict[str, Any]] = {
    "direct": {"pipeline": "direct"},
    "bulk": {"pipeline": "bulk", "stages": 2, "rows_in_flight": 2},
    "async": {"pipeline": "async", "stages": 2, "reload": "smem", "weight_in": "smem"},
    "producer": {"pipeline": "producer", "stages": 3, "rows_per_cta": 3, "reload": "smem"},
}
SHAPES = ["42x1024:bf16", "33x1024:fp16:fp32", "21x512:fp32+offset"]
FORWARD_CASES = [
    (name, pipeline, shape)
    for name, pipeline, any_shape in in_turn(FORWARDS, [*OF_FORWARDS], inner=SHAPES)
    if is_legal(name, shape := fitting(name, any_shape), **OF_FORWARDS[pipeline])
]
FREE = ["atomic", "bulk_free"]


def outputs_of(name: str) -> set[str]:
    """The outputs that a plain call has."""
    signature = library.signature_of(name)
    return {t.name for t in signature.tensors if t.output and not t.extra and not t.option}


@pytest.mark.parametrize(("name", "pipeline", "shape"), FORWARD_CASES)
def test_every_schedule_gives_one_set_of_right_bits(
    name: str, pipeline: str, shape: str, target: Target
) -> None:
    problem = Problem.parse(shape, name)
    variant = small(problem, target, **OF_FORWARDS[pipeline])
    check = check_variant(variant, problem, schedules=5, seed=SEED, all_rows=True)
    assert check.problems == ()
    assert (check.schedules, check.distinct_results) == (5, 1)
    assert check.errors.keys() == outputs_of(name)


def test_every_forward_has_nearly_all_pipelines() -> None:
    for name in FORWARDS:
        assert len([case for case in FORWARD_CASES if case[0] == name]) >= 4, name


@pytest.mark.sampled(32)
@pytest.mark.parametrize(
    ("name", "reduction", "pipeline"), in_turn(BACKWARDS, DETERMINISTIC, inner=[*OF_BACKWARDS])
)
def test_deterministic_reduction_gives_one_set_of_right_bits(
    name: str, reduction: str, pipeline: str, target: Target
) -> None:
    shape = f"{name}:42x1024:bf16"
    variant = small_variant(shape, reduction, target, **OF_BACKWARDS[pipeline])
    check = check_variant(variant, Problem.parse(shape), schedules=20, seed=SEED, all_rows=True)
    assert check.problems == ()
    assert (check.schedules, check.distinct_results) == (20, 1)
    assert check.errors.keys() == outputs_of(name)


@pytest.mark.parametrize(("name", "reduction"), in_turn(BACKWARDS, inner=FREE))
def test_free_running_reduction_is_told_apart(name: str, reduction: str, target: Target) -> None:
    shape = f"{name}:42x1024:bf16"
    variant, problem = small_variant(shape, reduction, target), Problem.parse(shape)
    check = check_variant(variant, problem, schedules=60, seed=SEED, all_rows=True)
    assert check.problems == ()
    assert check.distinct_results > 1
    spec, launch = small_launch(variant, problem.M)
    claim = replace(spec, determinism="gpu_to_gpu")
    caught = check_source(render(variant), claim, launch, problem, schedules=60, seed=SEED)
    assert caught.problems


HEADS = [
    *(("203x128:bf16", threads) for threads in (8, 16, 32)),
    *(("97x64:fp16:fp32", 8), ("145x256:bf16", 32)),
    *(("97x128:fp32+offset", threads) for threads in (16, 32)),
]
SHARED_WARPS = [  # and test_rmsnorm_rope.py has these and more for rotated rows
    (name, shape, threads)
    for name in NAMES
    if name not in library.ROTATED
    for shape, threads in HEADS
    if is_legal(name, shape, threads_per_row=threads, rows_per_cta=8)
]


@pytest.mark.sampled(43)
@pytest.mark.parametrize(("name", "shape", "threads"), SHARED_WARPS)
def test_rows_that_share_a_warp(name: str, shape: str, threads: int, target: Target) -> None:
    problem = Problem.parse(shape, name)
    variant = small(problem, target, threads_per_row=threads, rows_per_cta=8)
    assert check_variant(variant, problem, schedules=3, all_rows=True).problems == ()


@pytest.mark.parametrize("name", ["rmsnorm_sum3_backward", "rmsnorm_rope_backward"])
@pytest.mark.parametrize("shape", ["1x8192:fp32", "2x8192:fp32"])
def test_parts_that_cancel_in_few_rows_are_no_error(name: str, shape: str, target: Target) -> None:
    """A rounding of the parts of what dw adds up may be more than the bound by what is left."""
    problem = Problem.parse(shape, name)
    variant = small(problem, target, threads_per_row=512, rows_per_cta=1)
    assert check_variant(variant, problem, schedules=2, all_rows=True).problems == ()


SUMMING = [name for name in NAMES if library.signature_of(name).row_sums]


@pytest.mark.parametrize(("name", "pipeline"), in_turn(SUMMING, inner=["direct", "bulk", "async"]))
def test_ctas_of_a_cluster_share_a_row(name: str, pipeline: str, target: Target) -> None:
    problem = Problem.parse("37x8192:bf16", name)
    knobs = OF_BACKWARDS[pipeline] if name in BACKWARDS else OF_FORWARDS[pipeline]
    kept = {"pipeline": pipeline, "stages": knobs.get("stages", 1)}
    variant = small(problem, target, cluster=2, threads_per_row=256, **kept)
    assert check_variant(variant, problem, schedules=3, all_rows=True).problems == ()


@pytest.mark.parametrize("name", [n for n in NAMES if "eps" in NUMBERS[n]])
def test_any_eps_is_that_of_the_call(name: str, target: Target) -> None:
    problem, operation = Problem.parse("42x1024:fp32", name), OPERATIONS[name]
    given = operation.make_inputs(problem, CPU)
    small_rows = given.x * 0.01
    for eps in (0.25, given.eps):
        inputs = replace(given, x=small_rows, eps=eps)
        found = run_to_one_result(small(problem, target), inputs)
        expected = operation.bounds(problem, inputs)
        assert compare_all(found, expected).fault == ""
        other = operation.bounds(problem, replace(inputs, eps=0.1))
        assert compare_all(found, other).fault


# ---- Calls ---------------------------------------------------------------------------------------


@of_name
def test_what_a_call_asks_for_has_the_bits_of_a_plain_call(name: str, target: Target) -> None:
    problem = Problem.parse("42x1024:bf16", name)
    variant = small(problem, target)
    inputs = OPERATIONS[name].make_inputs(problem, CPU)
    plain = run_to_one_result(variant, inputs)
    packed = run_to_one_result(variant, inputs, CallOptions(inner=7))
    assert all(same_bits(packed[out], plain[out]) for out in plain)
    for left_out in plain if len(plain) > 1 else ():
        found = run_to_one_result(variant, inputs, CallOptions(without=frozenset([left_out])))
        assert found.keys() == plain.keys() - {left_out}
        assert all(same_bits(found[out], plain[out]) for out in found)
    if name in BACKWARDS:
        wide = run_to_one_result(variant, inputs, CallOptions(dw_mode=DW_IN_FP32))["dw"]
        assert torch.equal(wide.to(torch.bfloat16), plain["dw"])
        start = torch.linspace(-3, 5, len(wide))
        options = CallOptions(dw_mode=DW_ADDED, added_to=start)
        added = run_to_one_result(variant, inputs, options)["dw"]
        assert torch.equal(added, start + wide)


# ---- Planted bugs --------------------------------------------------------------------------------

EVERY_THREAD = (" && row_thread() == 0", "")
PLANTED: dict[str, list[tuple[str, str, str]]] = {
    "gated_rmsnorm_forward": [
        ("__fmaf_rn(u_i, u_i, sum[u])", "sum[u]", r"y\[.* are off"),
        ("{__fmul_rn(z, sigmoid)", "{sigmoid", r"y\[.* are off"),
    ],
    "gated_rmsnorm_sigmoid_forward": [("{sigmoid", "{z * sigmoid", r"y\[.* are off")],
    "gate_first_rmsnorm_forward": [
        ("__fmul_rn(element<Element>(xs[u][j].words, i), gate)", "gate", r"y\[.* are off")
    ],
    "gated_rmsnorm_backward": [
        ("__fmul_rn(correction, xe)", "0.0f", r"dx\[.* are off"),
        ("__fmaf_rn(z, __fadd_rn(1.0f, -sigmoid), 1.0f)", "1.0f", r"dz\[.* are off"),
        ("__fmaf_rn(u_i, u_i, sum[u])", "sum[u]", r"dx\[.* are off"),
    ],
    "gate_first_rmsnorm_backward": [
        ("__fmul_rn(du, gate.value)", "du", r"dx\[.* are off"),
        ("__fmul_rn(xe, gate.slope)", "xe", r"dz\[.* are off"),
        ("__fmaf_rn(u_i, scaled, partial", "__fmaf_rn(xe, scaled, partial", "off"),
    ],
    "rmsnorm_add_forward": [
        ("element<Element>(rs[u][j].words, i))", "0.0f)", r"y\[.* are off"),
        ("i), out_rstd)", "i), 1.0f)", r"y\[.* are off"),
        (*EVERY_THREAD, r"writes rstd\[\d+\] a second time"),
        ("args.rstd + row,", "args.rstd + row + 1,", r"rstd\[0\] was never|out of"),
    ],
    "layernorm_forward": [
        (  # no bias
            "weight_of(w, i, args.weight_offset), element<WeightElement>(added.words, i)",
            "weight_of(w, i, args.weight_offset), 0.0f",
            r"y\[.* are off",
        ),
        ("row_sum(later_sum);", "", r"rstd\[.* are off"),  # a sum of one warp alone
        ("if (!rows.owns(j, rows.column(j))) continue;", "", r"rstd\[.* are off"),
        ("i), -sum[u])", "i), 0.0f)", r"mean\[.* are off"),
        ("centred, out_rstd, shift)", "centred, out_rstd, 1.0f)", r"y\[.* are off"),
        ("__fmaf_rn(centred, centred,", "__fadd_rn(centred,", r"rstd\[.* are off"),
        (*EVERY_THREAD, r"writes mean\[\d+\] a second"),
    ],
    "layernorm_backward": [
        # No mean(w * dy).
        ("__fmul_rn(scale[u], __fmul_rn(sum[u], inverse_columns))", "0.0f", r"dx\[.* are off"),
        ("value[u] = warp_sum(value[u]);", "", r"dx\[.* are off"),  # of one warp alone
        ("words, i), -mean[u]);", "words, i), 0.0f);", r"dx\[.* are off"),
        ("partial[kVectors + j][i] = __fadd_rn(dy,", "__fadd_rn(dy,", r"dw\[\d+\] .* are off"),
        ("place + columns / 2", "place", "which nobody has written"),
    ],
    "rmsnorm_fp8_forward": [
        ("mask = kBlockLanes / 2", "mask = 0", r"y8\[.*off"),  # of a thread alone
        ("mask = kBlockLanes / 2", "mask = kBlockLanes / 4", r"y8\[.*off"),
        ("if (j % kBlockVectors != 0)", "if (false)", r"y8\[.*off"),  # of its first vector
        (
            "if (row_thread() % kBlockLanes != 0) return;",
            "",
            r"writes y_scales\[\d+, \d+\] a second",
        ),
        (
            "(quotient(values[i]), quotient(values[i + 1]))",
            "(quotient(values[i + 1]), quotient(values[i]))",
            r"y8\[.*off",
        ),
        (
            "+ vector % kBlockVectors * kBlockLanes)",
            "+ vector % kBlockVectors)",
            r"y8\[.*off|writes",
        ),
        ("/ 448.0f", "/ 447.0f", r"y_scales\[.*off"),
        ("args.rounded != 0.0f", "true", r"y8\[.*off"),
        ("args.powers != 0.0f", "true", r"y_scales\[.*off"),
    ],
    "rmsnorm_fp8_residual_forward": [
        ("return element<Element>(&word, 0);", "return total;", r"y8\[.*off"),  # not rounded
        ("out_h[i] = rounded_sum(", "out_h[i] = __fmul_rn(", r"h\[.*off"),
        ("const float total = rounded_sum(", "const float total = __fmul_rn(", r"rstd\[.*off"),
    ],
}
SHAPES = {"layernorm_forward": "42x1000:bf16", "rmsnorm_fp8_forward": "42x2048:bf16"}
"""Rows with threads that have no elements, and with two vectors a thread, for bugs of these."""


@pytest.mark.parametrize(
    ("name", "old", "new", "found"), [(n, *bug) for n, bugs in PLANTED.items() for bug in bugs]
)
def test_planted_wrong_kernel_is_caught(
    name: str, old: str, new: str, found: str, target: Target
) -> None:
    problem = Problem.parse(SHAPES.get(name, "42x1024:bf16"), name)
    variant = small(problem, target)
    source = render(variant)
    assert old in source
    spec, launch = small_launch(variant, problem.M)
    check = check_source(source.replace(old, new), spec, launch, problem, schedules=3)
    assert any(re.search(found, said) for said in check.problems), check.problems
