"""LayerNorm in the emulator: every pipeline against float64, under many schedules, and rows whose
mean and variance are hard to compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from generator.emulate import check_variant, find_compiler
from generator.emulate.check import CPU
from generator.emulate.run import CallOptions
from generator.operations import LAYERNORM_FORWARD
from generator.operations.rows import make_reference
from generator.problem import Problem
from generator.target import Target
from normforge import operations as library
from tests.support.emulator import run_to_one_result, small

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

NAME = LAYERNORM_FORWARD.name
OUTPUTS = {"y", "mean", "rstd"}
PIPELINES: dict[str, dict[str, int | str]] = {
    "direct": {"pipeline": "direct", "grid": "rows"},
    "walking": {"pipeline": "direct", "grid": "full", "rows_in_flight": 2},
    "bulk": {"pipeline": "bulk", "grid": "full", "stages": 2, "rows_in_flight": 2},
    "async": {"pipeline": "async", "grid": "even", "stages": 2},
}


def problem_of(shape: str) -> Problem:
    return Problem.parse(shape, NAME)


@pytest.mark.parametrize("pipeline", ["bulk", "async"])
def test_rows_may_be_read_again_behind_the_first_sums(pipeline: str, target: Target) -> None:
    """The space has no such config, but that of another operation with later sums may."""
    problem = problem_of("42x1024:bf16")
    plain = small(problem, target, **PIPELINES[pipeline])
    variant = replace(plain, config={**plain.config, "stages": 3, "reload": "smem"})
    check = check_variant(variant, problem, schedules=5, seed=2026, all_rows=True)
    assert (check.problems, check.distinct_results) == ((), 1)


@pytest.mark.parametrize("pipeline", ["direct", "bulk", "async"])
def test_the_ctas_of_a_cluster_exchange_their_sums_twice(pipeline: str, target: Target) -> None:
    problem = problem_of("37x8192:bf16")
    variant = small(problem, target, cluster=2, threads_per_row=256, **PIPELINES[pipeline])
    assert check_variant(variant, problem, schedules=5, all_rows=True).problems == ()


@pytest.mark.parametrize(
    ("shape", "knobs"),
    [
        *(("203x128:bf16", {"threads_per_row": n, "rows_per_cta": 8}) for n in (8, 16, 32)),
        ("97x1000:bf16", {"threads_per_row": 128}),  # threads idle, whose elements are no zeros
        ("97x1001:bf16", {"threads_per_row": 256}),
        ("33x1002:fp16:fp32", {"threads_per_row": 64, "rows_per_cta": 4, "weight_in": "smem"}),
    ],
)
def test_narrow_rows_and_rows_that_threads_do_not_divide(
    shape: str, knobs: dict[str, int | str], target: Target
) -> None:
    problem = problem_of(shape)
    variant = small(problem, target, **knobs)
    assert check_variant(variant, problem, schedules=3, all_rows=True).problems == ()


@pytest.mark.parametrize("weight_in", ["registers", "smem"])
@pytest.mark.parametrize("shape", ["42x1024:bf16", "42x1024:fp16:fp32"])
def test_a_call_may_do_without_any_tensor(shape: str, weight_in: str, target: Target) -> None:
    problem = problem_of(shape)
    variant = small(problem, target, weight_in=weight_in, threads_per_row=32, rows_per_cta=8)
    inputs = LAYERNORM_FORWARD.make_inputs(problem, CPU)
    for instead in (
        {"weight": torch.ones_like(inputs.weight)},
        {"bias": torch.zeros_like(inputs.bias)},
    ):
        wanted = run_to_one_result(variant, replace(inputs, **instead))
        found = run_to_one_result(variant, replace(inputs, **dict.fromkeys(instead)))
        assert all(torch.equal(found[name], wanted[name]) for name in OUTPUTS)
    plain = run_to_one_result(variant, inputs)
    for left_out in OUTPUTS:
        found = run_to_one_result(variant, inputs, CallOptions(without=frozenset({left_out})))
        assert found.keys() == OUTPUTS - {left_out}
        assert all(torch.equal(result, plain[name]) for name, result in found.items())


# ---- Accuracy ------------------------------------------------------------------------------------


def errors(
    shape: str, target: Target, mean: float, std: float, outlier: float = 0.0
) -> dict[str, tuple[float, float]]:
    """The errors of every output against float64, and those of PyTorch, for rows with this mean and
    standard deviation, whose first element is an outlier."""
    problem = problem_of(shape)
    given: Any = LAYERNORM_FORWARD.make_inputs(problem, CPU)
    drawn = torch.randn(given.x.shape, generator=torch.Generator().manual_seed(7))
    x = drawn * std + mean * torch.linspace(0.5, 1.0, problem.M)[:, None]
    x[:, 0] += outlier
    inputs = replace(given, x=x.to(given.x.dtype))
    found = run_to_one_result(small(problem, target), inputs)
    rows, weight, bias = inputs.x, inputs.weight, inputs.bias
    layer_norm = torch.ops.aten.native_layer_norm
    # As on a GPU: in fp32 from rows of any dtype, and rounded once.
    y, *statistics = layer_norm(rows.float(), [problem.N], weight.float(), bias.float(), inputs.eps)
    theirs = dict(zip(found, (y.to(rows.dtype), *statistics), strict=True))
    wide = (rows.double(), [problem.N], weight.double(), bias.double(), inputs.eps)
    exact = dict(zip(found, layer_norm(*wide), strict=True))

    def error(of: dict[str, torch.Tensor], name: str) -> float:
        return float((of[name].double().flatten() - exact[name].flatten()).norm())

    return {name: (error(found, name), error(theirs, name)) for name in found}


@pytest.mark.parametrize("std", [1.0, 0.01])
@pytest.mark.parametrize("mean", [0.0, 30.0, 1e3, -1e4])
@pytest.mark.parametrize("shape", ["97x1024:fp32", "97x1000:fp32", "97x1024:bf16"])
def test_no_row_has_a_larger_error_than_pytorchs(
    shape: str, mean: float, std: float, target: Target
) -> None:
    for name, (ours, bar) in errors(shape, target, mean, std).items():
        # A mean near 0 is the rest of numbers as large as std, with half a unit of theirs.
        rest = 2.0**-24 * std * 97**0.5 if name == "mean" else 0.0
        assert ours <= 1.1 * bar + rest, name


@pytest.mark.parametrize("outlier", [1e3, -3e4])
def test_an_outlier_in_front_costs_no_digits(outlier: float, target: Target) -> None:
    for name, (ours, bar) in errors("97x1024:fp32", target, 0.5, 1.0, outlier).items():
        assert ours <= 1.1 * bar, name


@pytest.mark.parametrize("mean", [1e3, 1e4])
def test_rows_around_a_large_mean_keep_all_digits_of_their_differences(
    mean: float, target: Target
) -> None:
    """PyTorch subtracts a mean that is rounded."""
    ours, bar = errors("97x1000:fp32", target, mean, 1.0)["y"]
    assert ours < 0.05 * bar
    ours, bar = errors("97x1000:fp32", target, mean, 1e-3 * mean**0.5)["rstd"]
    assert ours < 0.01 * bar


def test_rows_of_one_number_are_the_bias(target: Target) -> None:
    problem = problem_of("42x1000:fp32")
    given = LAYERNORM_FORWARD.make_inputs(problem, CPU)
    x = torch.linspace(-1e4, 1e4, problem.M)[:, None].expand_as(given.x).contiguous()
    inputs = replace(given, x=x)
    found = run_to_one_result(small(problem, target), inputs)
    torch.testing.assert_close(found["y"], inputs.bias.expand_as(x), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(found["mean"], x[:, 0], rtol=2.0**-23, atol=0.0)
    reference = make_reference(library.LAYERNORM_FORWARD, problem, inputs)
    torch.testing.assert_close(found["rstd"].double(), reference.outputs["rstd"])


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_what_is_no_number_stays_in_its_row_and_shows_in_all_results(
    pipeline: str, target: Target
) -> None:
    problem = problem_of("42x1000:bf16")
    given = LAYERNORM_FORWARD.make_inputs(problem, CPU)
    variant = small(problem, target, **PIPELINES[pipeline])
    plain = run_to_one_result(variant, given)
    x = given.x.clone()
    x[3, 5], x[7, 999], x[11, ::2] = torch.nan, torch.inf, -torch.inf
    found = run_to_one_result(variant, replace(given, x=x))
    bad = [3, 7, 11]
    rest = [row for row in range(problem.M) if row not in bad]
    assert all(torch.equal(found[name][rest], plain[name][rest]) for name in OUTPUTS)
    assert found["y"][bad].isnan().all() and found["rstd"][bad].isnan().all()
    assert not found["mean"][bad].isfinite().any()
