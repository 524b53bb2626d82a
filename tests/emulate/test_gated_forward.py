"""Gated RMSNorms in the emulator: every variant of their kernels and every pipeline against
float64, under many schedules."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from generator.emulate import check_variant, find_compiler
from generator.emulate.check import CPU, check_source, small_launch
from generator.emulate.run import CallOptions
from generator.kernels.render import render
from generator.kernels.variant import Variant
from generator.operations import GATED_FORWARDS, OPERATIONS
from generator.operations.rows import make_reference
from generator.problem import Problem
from generator.target import Target
from normforge import operations as library
from normforge.operations.gated_rmsnorm_backward import gated_rmsnorm
from tests.support.emulator import run_to_one_result
from tests.support.samples import in_turn, plain_variant

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

NAMES = [operation.name for operation in GATED_FORWARDS]
of_name = pytest.mark.parametrize("name", NAMES)
PIPELINES: dict[str, dict[str, int | str]] = {
    "direct": {"pipeline": "direct", "grid": "rows"},
    "walking": {"pipeline": "direct", "grid": "full", "rows_in_flight": 2},
    "bulk": {"pipeline": "bulk", "grid": "full", "stages": 2, "rows_in_flight": 2},
    "async": {"pipeline": "async", "grid": "even", "stages": 2},
    "read again": {"pipeline": "async", "grid": "full", "stages": 2, "reload": "smem"},
}


def small(problem: Problem, target: Target, **knobs: int | str) -> Variant:
    return plain_variant(replace(problem, M=4096), target, strategy="none", **knobs)


@pytest.mark.parametrize(
    ("name", "pipeline", "shape"),
    in_turn(NAMES, [*PIPELINES], inner=["42x1024:bf16", "33x1024:fp16:fp32", "21x512:fp32+offset"]),
)
def test_every_schedule_gives_one_set_of_right_bits(
    name: str, shape: str, pipeline: str, target: Target
) -> None:
    problem = Problem.parse(shape, name)
    variant = small(problem, target, **PIPELINES[pipeline])
    check = check_variant(variant, problem, schedules=5, seed=2026, all_rows=True)
    assert check.problems == ()
    assert check.distinct_results == 1
    assert check.errors.keys() == {"y"}


@pytest.mark.parametrize(
    ("shape", "threads_per_row"),
    [
        *(("203x128:bf16", threads) for threads in (8, 16, 32)),
        ("97x64:fp16:fp32", 8),
        ("145x256:bf16", 32),
    ],
)
@of_name
def test_heads(name: str, shape: str, threads_per_row: int, target: Target) -> None:
    problem = Problem.parse(shape, name)
    variant = small(problem, target, threads_per_row=threads_per_row, rows_per_cta=10)
    assert check_variant(variant, problem, schedules=3, all_rows=True).problems == ()


@of_name
def test_a_cluster_has_one_row_sum(name: str, target: Target) -> None:
    problem = Problem.parse("37x8192:bf16", name)
    variant = small(problem, target, cluster=2, threads_per_row=256)
    assert check_variant(variant, problem, schedules=3, all_rows=True).problems == ()


PLANTED = [
    ("gated", "__fmaf_rn(u_i, u_i, sum[u])", "sum[u]"),
    ("gated", "{__fmul_rn(low, sigmoid)", "{sigmoid"),
    ("gated_rmsnorm_sigmoid", "{sigmoid", "{z * sigmoid"),
    ("gate_first", "__fmul_rn(element<Element>(xs[u][j].words, i), gate)", "gate"),
]


@pytest.mark.parametrize(("which", "old", "new"), PLANTED)
def test_planted_wrong_kernel_is_caught(which: str, old: str, new: str, target: Target) -> None:
    name = which if "rmsnorm" in which else f"{which}_rmsnorm"
    problem = Problem.parse(f"{name}_forward:42x1024:bf16")
    variant = small(problem, target)
    source = render(variant)
    assert old in source
    spec, launch = small_launch(variant, problem.M)
    check = check_source(source.replace(old, new), spec, launch, problem, schedules=3)
    assert any(re.search(r"y\[.* are off", said) for said in check.problems), check.problems


@of_name
def test_any_eps_is_that_of_the_call(name: str, target: Target) -> None:
    problem = Problem.parse(f"{name}:42x1024:fp32")
    given = OPERATIONS[name].make_inputs(problem, CPU)
    inputs = replace(given, x=given.x * 0.01, eps=0.25)
    found = run_to_one_result(small(problem, target), inputs)
    reference = make_reference(library.OPERATIONS[name], problem, inputs)
    torch.testing.assert_close(found["y"].double(), reference.outputs["y"], rtol=1e-5, atol=1e-6)


@of_name
def test_it_is_what_pytorch_computes(name: str, target: Target) -> None:
    """PyTorch's norm and activations stand beside the formula of the operation."""
    problem = Problem.parse(f"{name}:42x1024:fp32")
    inputs = OPERATIONS[name].make_inputs(problem, CPU)
    activation, norm_before_gate = next(
        kind for kind, one in library.GATED_FORWARDS.items() if one.name == name
    )
    act = torch.nn.functional.silu if activation == "silu" else torch.sigmoid
    x, gate, weight = inputs.x.double(), act(inputs.z.double()), inputs.weight.double()
    rows = x if norm_before_gate else x * gate
    wanted = torch.nn.functional.rms_norm(rows, (1024,), weight, inputs.eps)
    wanted = wanted * gate if norm_before_gate else wanted
    found = run_to_one_result(small(problem, target), inputs)["y"].double()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


GATES = torch.tensor(
    [0.0, -0.0, 1e-30, 0.5, -3, 8, -8, 20, -20, 60, -60, 86, -86, 200, torch.finfo().min, 1e6]
)


@of_name
def test_gates_of_any_size_have_their_value(name: str, target: Target) -> None:
    """Gates beyond 87 have the value of 87: what is left of a sigmoid there is 1e-38."""
    problem = Problem.parse(f"{name}:16x64:fp32")
    given = OPERATIONS[name].make_inputs(problem, CPU)
    z = GATES.repeat(4).expand(16, 64).contiguous()
    inputs = replace(given, z=z)
    variant = small(problem, target, threads_per_row=16, rows_per_cta=8)
    found = run_to_one_result(variant, inputs)["y"]
    exact = make_reference(library.OPERATIONS[name], problem, inputs).outputs["y"]
    assert found.isfinite().all()
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-30)


@of_name
def test_rows_are_read_where_they_lie(name: str, target: Target) -> None:
    shape = f"{name}:42x1024:bf16"
    variant = small(Problem.parse(shape), target)
    inputs = OPERATIONS[name].make_inputs(Problem.parse(shape), CPU)
    plain = run_to_one_result(variant, inputs)["y"]
    packed = run_to_one_result(variant, inputs, CallOptions(inner=7))["y"]
    assert torch.equal(packed, plain)


@of_name
def test_errors_are_at_most_those_of_eager_code(name: str, target: Target) -> None:
    problem = Problem.parse(f"{name}:97x128:bf16")
    inputs = OPERATIONS[name].make_inputs(problem, CPU)
    kind = next(kind for kind, one in library.GATED_FORWARDS.items() if one.name == name)
    variant = small(problem, target, threads_per_row=16, rows_per_cta=8)
    found = run_to_one_result(variant, inputs)["y"]
    given = (inputs.x, inputs.z, inputs.weight)
    exact = gated_rmsnorm(*(one.double() for one in given), inputs.eps, *kind)
    wide = (one.float() for one in given)
    eager = gated_rmsnorm(*wide, inputs.eps, *kind).to(torch.bfloat16)
    error, bar = ((one.double() - exact).norm() for one in (found, eager))
    assert error <= 1.001 * bar
