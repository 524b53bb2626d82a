"""The backwards of gated RMSNorms in the emulator: every variant of them, pipeline and strategy,
against float64, under many schedules."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from generator.emulate import check_variant, find_compiler
from generator.emulate.check import CPU, check_source, small_launch
from generator.emulate.run import CallOptions
from generator.kernels.render import render
from generator.operations import GATED_BACKWARDS, OPERATIONS
from generator.operations.rows import make_reference
from generator.problem import Problem
from generator.target import Target
from normforge import operations as library
from normforge.launch.kernel_arguments import DW_ADDED, DW_IN_FP32
from tests.support.emulator import run_to_one_result, small_variant
from tests.support.samples import DETERMINISTIC, in_turn, plain_variant

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

NAMES = [operation.name for operation in GATED_BACKWARDS]
PIPELINES: dict[str, dict[str, int | str]] = {
    "direct": {"pipeline": "direct"},
    "bulk": {"pipeline": "bulk", "stages": 2, "rows_in_flight": 2},
    "async": {"pipeline": "async", "stages": 2, "reload": "smem", "weight_in": "smem"},
    "producer": {"pipeline": "producer", "stages": 3, "rows_per_cta": 3, "reload": "smem"},
}
SEED = 2026


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    ("name", "reduction", "pipeline"), in_turn(NAMES, DETERMINISTIC, inner=[*PIPELINES])
)
def test_deterministic_reduction_gives_one_set_of_right_bits(
    name: str, reduction: str, pipeline: str, target: Target
) -> None:
    shape = f"{name}:42x1024:bf16"
    variant = small_variant(shape, reduction, target, **PIPELINES[pipeline])
    check = check_variant(variant, Problem.parse(shape), schedules=20, seed=SEED, all_rows=True)
    assert check.problems == ()
    assert (check.schedules, check.distinct_results) == (20, 1)
    assert check.errors.keys() == {"dx", "dz", "dw"}


@pytest.mark.parametrize(
    ("shape", "threads_per_row"),
    [
        *(("203x128:bf16", threads) for threads in (8, 16, 32)),
        ("61x64:fp16:fp32", 8),
        *(("97x128:fp32+offset", threads) for threads in (16, 32)),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_heads(name: str, shape: str, threads_per_row: int, target: Target) -> None:
    problem = Problem.parse(shape, name)
    knobs = {"threads_per_row": threads_per_row, "rows_per_cta": 8, "strategy": "column_slices"}
    variant = plain_variant(replace(problem, M=4096), target, **knobs)
    assert check_variant(variant, problem, schedules=3, all_rows=True).problems == ()


@pytest.mark.parametrize("name", NAMES)
def test_a_cluster_has_one_row_sum_of_each_kind(name: str, target: Target) -> None:
    problem = Problem.parse("97x8192:bf16", name)
    knobs = {"cluster": 2, "strategy": "mailbox", "threads_per_row": 256}
    variant = plain_variant(replace(problem, M=4096), target, **knobs)
    assert check_variant(variant, problem, schedules=3, all_rows=True).problems == ()


PLANTED = [
    ("gated", "__fmul_rn(correction, xe)", "0.0f", r"dx\[.* are off"),
    ("gated", "__fmaf_rn(bounded, rest, 1.0f)", "1.0f", r"dz\[.* are off"),
    ("gated", "__fmaf_rn(u_i, u_i, sum[u])", "sum[u]", r"dx\[.* are off"),
    ("gate_first", "__fmul_rn(du, gate.value)", "du", r"dx\[.* are off"),
    ("gate_first", "__fmul_rn(xe, gate.slope)", "xe", r"dz\[.* are off"),
    ("gate_first", "__fmaf_rn(u_i, scaled, partial", "__fmaf_rn(xe, scaled, partial", "off"),
]


@pytest.mark.parametrize(("which", "old", "new", "found"), PLANTED)
def test_planted_wrong_kernel_is_caught(
    which: str, old: str, new: str, found: str, target: Target
) -> None:
    problem = Problem.parse(f"{which}_rmsnorm_backward:42x1024:bf16")
    variant = small_variant(str(problem), "column_slices", target)
    source = render(variant)
    assert old in source
    spec, launch = small_launch(variant, problem.M)
    options = {"schedules": 3}
    check = check_source(source.replace(old, new), spec, launch, problem, **options)
    assert any(re.search(found, said) for said in check.problems), check.problems


@pytest.mark.parametrize("name", NAMES)
def test_any_eps_is_that_of_the_call(name: str, target: Target) -> None:
    problem = Problem.parse(f"{name}:42x1024:fp32")
    operation = OPERATIONS[name]
    given = operation.make_inputs(problem, CPU)
    inputs = replace(given, x=given.x * 0.01, eps=0.25)
    variant = small_variant(str(problem), "column_slices", target)
    found = run_to_one_result(variant, inputs)
    reference = make_reference(library.OPERATIONS[name], problem, inputs)
    for out, exact in reference.outputs.items():
        torch.testing.assert_close(found[out].double(), exact, rtol=1e-4, atol=1e-5)


GATES = torch.tensor(
    [0.0, -0.0, 1e-30, 0.5, -3, 8, -8, 20, -20, 60, -60, 86, -86, 200, torch.finfo().min, 1e6]
)


@pytest.mark.parametrize("name", NAMES)
def test_gates_of_any_size_have_their_value_and_slope(name: str, target: Target) -> None:
    """Gates beyond 87 have those of 87: what is left of a sigmoid there is 1e-38."""
    problem = Problem.parse(f"{name}:16x64:fp32")
    given = OPERATIONS[name].make_inputs(problem, CPU)
    z = GATES.repeat(4).expand(16, 64).contiguous()
    inputs = replace(given, x=given.x.sign() * (1 + given.x.abs()), z=z)
    knobs = {"threads_per_row": 16, "rows_per_cta": 8}
    variant = small_variant(str(problem), "column_slices", target, **knobs)
    found = run_to_one_result(variant, inputs)
    reference = make_reference(library.OPERATIONS[name], problem, inputs)
    for out, exact in reference.outputs.items():
        off = (found[out].double() - exact).abs()
        assert torch.all(off <= 1e-5 * reference.scales[out].double() + 1e-30), out
        assert found[out].isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_what_a_call_asks_for_has_the_bits_of_a_plain_call(name: str, target: Target) -> None:
    shape = f"{name}:42x1024:bf16"
    variant = small_variant(shape, "column_slices", target)
    inputs = OPERATIONS[name].make_inputs(Problem.parse(shape), CPU)
    plain = run_to_one_result(variant, inputs)
    for left_out in plain:
        found = run_to_one_result(variant, inputs, CallOptions(without=frozenset([left_out])))
        assert found.keys() == plain.keys() - {left_out}
        assert all(torch.equal(found[out], plain[out]) for out in found)
    wide = run_to_one_result(variant, inputs, CallOptions(dw_mode=DW_IN_FP32))["dw"]
    assert torch.equal(wide.to(torch.bfloat16), plain["dw"])
    start = torch.linspace(-3, 5, 1024)
    added = run_to_one_result(variant, inputs, CallOptions(dw_mode=DW_ADDED, added_to=start))["dw"]
    assert torch.equal(added, start + wide)
    packed = run_to_one_result(variant, inputs, CallOptions(inner=7))
    assert all(torch.equal(packed[out], plain[out]) for out in plain)
