"""RMSNorm that is added to a residual stream, in the emulator: every pipeline against float64,
under many schedules."""

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
from generator.operations import RMSNORM_ADD_FORWARD
from generator.operations.rows import make_reference
from generator.problem import Problem
from generator.target import Target
from normforge import operations as library
from tests.support.emulator import run_to_one_result
from tests.support.samples import plain_variant

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

NAME = RMSNORM_ADD_FORWARD.name
PIPELINES: dict[str, dict[str, int | str]] = {
    "direct": {"pipeline": "direct", "grid": "rows"},
    "walking": {"pipeline": "direct", "grid": "full", "rows_in_flight": 2},
    "bulk": {"pipeline": "bulk", "grid": "full", "stages": 2, "rows_in_flight": 2},
    "async": {"pipeline": "async", "grid": "even", "stages": 2},
    "read again": {"pipeline": "async", "grid": "full", "stages": 2, "reload": "smem"},
}


def problem_of(shape: str) -> Problem:
    return Problem.parse(shape, NAME)


def small(problem: Problem, target: Target, **knobs: int | str) -> Variant:
    return plain_variant(replace(problem, M=4096), target, strategy="none", **knobs)


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("shape", ["42x1024:bf16", "33x1024:fp16:fp32", "21x512:fp32+offset"])
def test_every_schedule_gives_one_set_of_right_bits(
    shape: str, pipeline: str, target: Target
) -> None:
    problem = problem_of(shape)
    variant = small(problem, target, **PIPELINES[pipeline])
    check = check_variant(variant, problem, schedules=5, seed=2026, all_rows=True)
    assert check.problems == ()
    assert check.distinct_results == 1
    assert check.errors.keys() == {"y", "rstd"}


def test_a_cluster_writes_one_rstd(target: Target) -> None:
    problem = problem_of("37x8192:bf16")
    variant = small(problem, target, cluster=2, threads_per_row=256)
    assert check_variant(variant, problem, schedules=3, all_rows=True).problems == ()


@pytest.mark.parametrize("threads_per_row", [8, 32])
def test_rows_that_share_a_warp_have_an_rstd_each(threads_per_row: int, target: Target) -> None:
    problem = problem_of("203x128:bf16")
    variant = small(problem, target, threads_per_row=threads_per_row, rows_per_cta=8)
    assert check_variant(variant, problem, schedules=3, all_rows=True).problems == ()


PLANTED = {
    "r is left out": ("element<Element>(rs[u][j].words, i))", "0.0f)", r"y\[.* are off"),
    "the norm is left out": ("i), out_rstd)", "i), 1.0f)", r"y\[.* are off"),
    "every thread writes rstd": (" && row_thread() == 0", "", r"writes rstd\[\d+\] a second time"),
    "rstd lies elsewhere": (
        "args.rstd + row,",
        "args.rstd + row + 1,",
        r"rstd\[0\] was never|out of",
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_wrong_kernel_is_caught(bug: str, target: Target) -> None:
    old, new, said = PLANTED[bug]
    problem = problem_of("42x1024:bf16")
    variant = small(problem, target)
    source = render(variant)
    assert old in source
    spec, launch = small_launch(variant, problem.M)
    check = check_source(source.replace(old, new), spec, launch, problem, schedules=3)
    assert any(re.search(said, one) for one in check.problems), check.problems


def test_any_eps_is_that_of_the_call(target: Target) -> None:
    problem = problem_of("42x1024:fp32")
    given = RMSNORM_ADD_FORWARD.make_inputs(problem, CPU)
    inputs = replace(given, x=given.x * 0.01, eps=0.25)
    found = run_to_one_result(small(problem, target), inputs)
    reference = make_reference(library.RMSNORM_ADD_FORWARD, problem, inputs)
    for name, exact in reference.outputs.items():
        torch.testing.assert_close(found[name].double(), exact.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("left_out", ["rstd", "y"])
def test_what_is_not_wanted_is_not_written(left_out: str, target: Target) -> None:
    problem = problem_of("42x1024:bf16")
    variant = small(problem, target)
    inputs = RMSNORM_ADD_FORWARD.make_inputs(problem, CPU)
    plain = run_to_one_result(variant, inputs)
    found = run_to_one_result(variant, inputs, CallOptions(without=frozenset({left_out})))
    assert found.keys() == {"y", "rstd"} - {left_out}
    assert all(torch.equal(result, plain[name]) for name, result in found.items())


def test_rows_are_read_where_they_lie(target: Target) -> None:
    problem = problem_of("42x1024:bf16")
    variant = small(problem, target)
    inputs = RMSNORM_ADD_FORWARD.make_inputs(problem, CPU)
    plain = run_to_one_result(variant, inputs)
    packed = run_to_one_result(variant, inputs, CallOptions(inner=7))
    assert all(torch.equal(packed[name], plain[name]) for name in ("y", "rstd"))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_it_is_what_pytorch_computes_with_a_smaller_error(dtype: str, target: Target) -> None:
    """PyTorch rounds the norm before it is added, too."""
    problem = problem_of(f"97x1024:{dtype}")
    inputs = RMSNORM_ADD_FORWARD.make_inputs(problem, CPU)
    found = run_to_one_result(small(problem, target), inputs)["y"]

    def eager(x: torch.Tensor, r: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return r + torch.nn.functional.rms_norm(x, (1024,), weight, inputs.eps)

    given = (inputs.x, inputs.r, inputs.weight)
    exact = eager(*(one.double() for one in given))
    error, bar = ((one.double() - exact).norm() for one in (found, eager(*given)))
    assert error < 0.9 * bar
    torch.testing.assert_close(found, exact.to(found.dtype))
