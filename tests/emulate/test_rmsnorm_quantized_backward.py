"""RMSNorm's backward whose dx is also quantized to FP8, in the emulator: every bit against the
formula of what the kernel itself gives as dx."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from generator.emulate import check_variant, find_compiler
from generator.emulate.check import CPU, check_source, small_launch
from generator.emulate.run import CallOptions
from generator.kernels.render import render
from generator.operations import OPERATIONS
from generator.problem import Problem
from generator.target import Target, find_target
from normforge.operations import BACKWARD_FORMATS
from normforge.operations.rmsnorm_quantized import quantize_1x128, quantize_mx
from tests.support.emulator import WITHOUT_DX, legal, run_to_one_result, small
from tests.support.samples import space_of

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

FP8, MX = (operation.name for operation in BACKWARD_FORMATS.values())
EARLY = {"pipeline": "producer", "stages": 3, "rows_per_cta": 2, "column_sums": "early"}
HOW: dict[str, dict[str, Any]] = {
    "direct": {"pipeline": "direct"},
    "bulk": {"pipeline": "bulk", "stages": 2, "rows_in_flight": 2},
    "early sums": EARLY,
    "rows of 16 threads": {"pipeline": "async", "threads_per_row": 16, "rows_per_cta": 8},
}


def quantized(name: str, dx: torch.Tensor, powers: float = 0.0) -> tuple[torch.Tensor, ...]:
    return quantize_mx(dx) if name == MX else quantize_1x128(dx, bool(powers))


def same(found: dict[str, torch.Tensor], wanted: tuple[torch.Tensor, ...]) -> None:
    for name, other in zip(("dx8", "dx_scales"), wanted, strict=True):
        assert (found[name].dtype, found[name].shape) == (other.dtype, other.shape)
        assert torch.equal(found[name].view(torch.uint8), other.view(torch.uint8)), name


def inputs_of(problem: Problem, **numbers: float) -> Any:
    """Return inputs with rows of all sizes, and with some whose gradients are zeros."""
    made = OPERATIONS[problem.operation].make_inputs(problem, CPU)
    made.dy *= torch.exp2(torch.arange(problem.M) % 40 - 20.0)[:, None].to(made.dy.dtype)
    made.dy[3] = 0.0
    return replace(made, **numbers)


@pytest.mark.parametrize("residual", ["", "+residual", "+residual_fp32"])
@pytest.mark.parametrize("name", [FP8, MX])
def test_rounded_dx_is_quantized_as_the_dx_that_is_written(
    name: str, residual: str, target: Target
) -> None:
    """The copy in the residual's dtype is rounded once, whatever is quantized."""
    problem = Problem.parse(f"{name}:42x1024:bf16{residual}")
    for powers in (0.0, 1.0)[: 1 + (name == FP8)]:
        numbers = {"powers": powers} if name == FP8 else {}
        variant = small(problem, target)
        found = run_to_one_result(variant, inputs_of(problem, rounded=1.0, **numbers))
        same(found, quantized(name, found["dx"].float(), powers))
        plain = run_to_one_result(variant, inputs_of(problem, **numbers))
        differ = plain["dx8"].view(torch.uint8) != found["dx8"].view(torch.uint8)
        assert differ.float().mean() > 0.01
        for out in found.keys() - {"dx8", "dx_scales"}:
            assert torch.equal(found[out], plain[out]), out
        if "fp32" in residual:
            same(plain, quantized(name, plain["dresidual_out"], powers))


@pytest.mark.parametrize("how", ["direct", "bulk", "early sums"])
@pytest.mark.parametrize("name", [FP8, MX])
def test_dx_in_fp32_is_quantized_bit_by_bit(name: str, how: str, target: Target) -> None:
    problem = Problem.parse(f"{name}:61x1024:fp32+residual")
    found = run_to_one_result(small(problem, target, **HOW[how]), inputs_of(problem))
    same(found, quantized(name, found["dx"]))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("how", HOW)
def test_every_pipeline_is_accurate(how: str, dtype: str, target: Target) -> None:
    columns = 128 if "16" in how else 1024
    problem = Problem.parse(f"{FP8}:61x{columns}:{dtype}+offset+residual")
    check = check_variant(small(problem, target, **HOW[how]), problem, schedules=5, all_rows=True)
    assert check.problems == ()
    assert check.distinct_results == 1


def test_a_cluster_shares_blocks_of_no_row(target: Target) -> None:
    problem = Problem.parse(f"{FP8}:21x8192:bf16")
    variant = small(problem, target, cluster=2, threads_per_row=256)
    assert check_variant(variant, problem, schedules=3, all_rows=True).problems == ()


@pytest.mark.parametrize("how", ["bulk", "early sums"])
@pytest.mark.parametrize("left_out", ["dx", "dx8", "dx_scales", "dw"])
def test_what_is_not_wanted_is_not_written(left_out: str, how: str, target: Target) -> None:
    problem = Problem.parse(f"{FP8}:42x1024:bf16")
    inputs, variant = inputs_of(problem), small(problem, target, **HOW[how])
    plain = run_to_one_result(variant, inputs)
    without = CallOptions(without=frozenset({left_out}))
    assert left_out != "dx" or without == WITHOUT_DX
    found = run_to_one_result(variant, inputs, without)
    assert found.keys() == {"dx", "dw", "dx8", "dx_scales"} - {left_out}
    for name, result in found.items():
        assert torch.equal(result.view(torch.uint8), plain[name].view(torch.uint8))


REFUSED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "rows with parts of blocks": (
        "256",
        "have parts of blocks",
        {"threads_per_row": 8, "rows_per_cta": 8},
    ),
    "columns that are no blocks": ("1000", "no whole number of blocks of 128", {}),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_has_no_kernel_is_said_in_one_sentence(fault: str, target: Target) -> None:
    columns, said, knobs = REFUSED[fault]
    found = legal(Problem.parse(f"{FP8}:16384x{columns}:bf16"), target, **knobs)
    assert isinstance(found, str) and said in found


def test_only_some_gpus_and_known_lengths_have_kernels(target: Target) -> None:
    problem = Problem.parse(f"{FP8}:16384x1024:bf16")
    found = legal(problem, find_target("a100"))
    assert isinstance(found, str) and "sm_89 or newer, which a100 does not have" in found
    config = small(problem, target).config
    found = space_of(FP8).reject(config, problem, target, exact=False)
    assert found is not None and "blocks" in str(found)


PLANTED = {
    "rounded before the copy": (
        "store_residual(args.dresidual_out",
        "round_to_rows(values), store_residual(args.dresidual_out",
        r"dresidual_out\[.*off",
    ),
    "without the residual": (
        "__fadd_rn(out[i], element<ResidualElement>(residuals[u][j].words, i))",
        "out[i]",
        r"dx8\[.*off|dx\[.*off",
    ),
    "of a thread's own columns": ("mask = kBlockLanes / 2", "mask = 0", r"dx8\[.*off"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_wrong_kernel_is_caught(bug: str, target: Target) -> None:
    old, new, said = PLANTED[bug]
    problem = Problem.parse(f"{FP8}:42x1024:bf16+residual_fp32")
    variant = small(problem, target)
    source, (spec, launch) = render(variant), small_launch(variant, problem.M)
    assert old in source
    check = check_source(source.replace(old, new), spec, launch, problem, schedules=3)
    assert any(re.search(said, problem) for problem in check.problems), check.problems
