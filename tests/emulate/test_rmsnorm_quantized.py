"""RMSNorm whose result is quantized to FP8, in the emulator: every pipeline against float64, and
every bit against the formula of what the kernel itself gives as y."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from generator.emulate import check_variant, find_compiler
from generator.emulate.check import CPU
from generator.emulate.run import CallOptions
from generator.errors import NormforgeError
from generator.operations import OPERATIONS
from generator.problem import Problem
from generator.target import Target, find_target
from normforge.operations import FORMATS
from normforge.operations.rmsnorm_quantized import quantize_1x128, quantize_mx
from tests.support.emulator import run_to_one_result, small
from tests.support.samples import space_of

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

FP8, MX = (operation.name for operation in FORMATS.values())
WITH_Y = CallOptions(extra=True)


def inputs_of(problem: Problem, x: torch.Tensor | None = None, **numbers: float) -> Any:
    made = OPERATIONS[problem.operation].make_inputs(problem, CPU)
    if x is not None:
        made.x.copy_(x)
        made.weight[-100] = torch.inf
    return replace(made, **numbers)


def awkward(M: int, N: int) -> torch.Tensor:
    """Rows of every size, with zeros of both signs, blocks of them, and of all that is no
    number."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn((M, N), generator=generator)
    x *= torch.exp2(torch.randint(-40, 40, (M, 1), generator=generator))
    x[:, 128:256] *= torch.exp2(torch.randint(-60, 9, (M, 1), generator=generator))
    x[0] = 0.0
    x[1, ::2] = -0.0
    x[2, :256] = 0.0
    x[3, 5] = torch.inf
    x[4, 300] = torch.nan
    x[5] = torch.finfo(torch.bfloat16).max
    x[6] = 1e-38
    return x


def same(found: dict[str, torch.Tensor], wanted: Any) -> None:
    """Compare bit by bit; NaNs of e4m3 have two forms."""
    for one, other in ((found["y8"], wanted.values), (found["y_scales"], wanted.scales)):
        assert one.dtype == other.dtype
        number = ~other.float().isnan()
        assert torch.equal(one.float().isnan(), ~number)
        bits = torch.int32 if one.dtype == torch.float32 else torch.uint8
        assert torch.equal(one.view(bits)[number], other.view(bits)[number])


def test_threads_without_elements_have_no_block(target: Target) -> None:
    problem = Problem.parse("37x2304:bf16", FP8)
    variant = small(problem, target, threads_per_row=128)
    assert variant.idle_columns > 0
    assert check_variant(variant, problem, schedules=2, all_rows=True).problems == ()


@pytest.mark.parametrize("powers", [0.0, 1.0])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_every_bit_of_a_scale_for_128_columns_is_that_of_the_formula(
    dtype: str, powers: float, target: Target
) -> None:
    problem = Problem.parse(f"96x1024:{dtype}", FP8)
    inputs = inputs_of(problem, awkward(96, 1024), rounded=1.0, powers=powers, eps=1e-12)
    found = run_to_one_result(small(problem, target), inputs, WITH_Y)
    same(found, quantize_1x128(found["y"].float(), bool(powers)))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_blocks_of_a_thread_are_divided_each_for_itself(dtype: str, target: Target) -> None:
    """The first of a thread's blocks is infinite, and the others are not."""
    problem = Problem.parse(f"6x4096:{dtype}", FP8)
    inputs = inputs_of(problem, eps=1e-12)
    inputs.weight[100] = torch.inf
    variant = small(problem, target, threads_per_row=128)
    assert variant.vectors > variant.block_vectors > 1
    found = run_to_one_result(variant, inputs, WITH_Y)
    assert found["y8"].float().isnan().nonzero()[:, 1].tolist() == [100] * 6
    assert found["y_scales"].isinf().nonzero()[:, 1].tolist() == [0] * 6


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_quotients_beside_the_middle_of_two_numbers_are_divided(dtype: str, target: Target) -> None:
    """In e4m3 these are rounded by their last bits in fp32, and rarely to even."""
    problem = Problem.parse(f"96x1024:{dtype}", FP8)
    x = torch.tensor([17.0, 19, 21, 23, 25, 27, 29, 31])[torch.arange(1024) % 8]
    x *= torch.exp2(torch.arange(1024) // 8 % 16 - 12.0)
    x[::128], x[5::8] = 448.0, torch.where(torch.arange(128) % 2 == 0, -0.0, x[5::8])
    x = x * torch.exp2(torch.arange(96) % 7 - 3.0)[:, None]
    x *= 1 - torch.arange(96)[:, None] % 13 / 128
    inputs = inputs_of(problem, eps=1e-12)
    inputs.x.copy_(x)
    inputs.weight.fill_(1.0)
    found = run_to_one_result(small(problem, target), inputs)
    given = inputs.x.float()
    y = given * found["rstd"].view(-1, 1)
    wanted = quantize_1x128(y)
    same(found, wanted)
    quotients = (y.unflatten(-1, (-1, 128)) / wanted.scales[..., None]).flatten(-2)
    fourth = torch.frexp(quotients)[0] * 32
    near = (fourth - fourth.round()).abs() < 2**-17
    assert near.float().mean() > 0.1


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_every_bit_of_mx_is_that_of_the_formula(dtype: str, target: Target) -> None:
    problem = Problem.parse(f"96x1024:{dtype}", MX)
    inputs = inputs_of(problem, awkward(96, 1024), rounded=1.0, eps=1e-12)
    found = run_to_one_result(small(problem, target), inputs, WITH_Y)
    same(found, quantize_mx(found["y"].float()))


@pytest.mark.parametrize("name", [FP8, MX])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_by_default_y_is_rounded_once(name: str, dtype: str, target: Target) -> None:
    """Rows in bf16 give what the same rows in fp32 do."""
    problem, wide = (Problem.parse(f"42x1024:{of}", name) for of in (dtype, "fp32"))
    inputs = inputs_of(problem)
    given = replace(inputs, x=inputs.x.float(), weight=inputs.weight.float())
    found = run_to_one_result(small(problem, target), inputs)
    exact = run_to_one_result(small(wide, target), given, WITH_Y)
    assert found.keys() == {"y8", "y_scales", "rstd"}
    y = exact["y"]
    same(exact, quantize_1x128(y) if name == FP8 else quantize_mx(y))
    # Threads have other columns, so that rstd differs in its last bits.
    differ = found["y8"].view(torch.uint8) != exact["y8"].view(torch.uint8)
    assert differ.float().mean() < 1e-3
    rounded = run_to_one_result(small(problem, target), replace(inputs, rounded=1.0), WITH_Y)
    again = rounded["y8"].view(torch.uint8) != found["y8"].view(torch.uint8)
    assert (again.float().mean() > 0.01) == (dtype == "bf16")


@pytest.mark.parametrize("left_out", ["rstd", "y8", "y_scales", "y"])
def test_what_is_not_wanted_is_not_written(left_out: str, target: Target) -> None:
    problem = Problem.parse("42x1024:bf16", MX)
    inputs, variant = inputs_of(problem), small(problem, target)
    plain = run_to_one_result(variant, inputs, WITH_Y)
    found = run_to_one_result(variant, inputs, replace(WITH_Y, without=frozenset({left_out})))
    assert found.keys() == {"y", "y8", "y_scales", "rstd"} - {left_out}
    for name, result in found.items():
        assert torch.equal(result.view(torch.uint8), plain[name].view(torch.uint8))


REFUSED = {
    ("h200", "4096x1000:bf16"): "1000 columns is no whole number of blocks of 128",
    ("a100", "4096x1024:bf16"): "conversions to FP8 need sm_89 or newer, which a100 does not have",
}


@pytest.mark.parametrize(("gpu", "shape"), REFUSED)
def test_what_has_no_kernel_is_said_in_one_sentence(gpu: str, shape: str) -> None:
    problem, target = Problem.parse(shape, FP8), find_target(gpu)
    with pytest.raises(NormforgeError, match=REFUSED[gpu, shape]):
        space_of(FP8).sample(problem, target, Random(0))


def test_no_kernel_has_blocks_in_parts(target: Target) -> None:
    problem = Problem.parse("4096x1024:bf16", FP8)
    variant = small(problem, target)
    narrow, few = {"vector_bytes": 4}, {"threads_per_row": 8}
    knobs = [{**variant.config, **one} for one in (narrow, few)]
    for changed in ({"N": 1088}, {"exact": False}, *({"config": one} for one in knobs)):
        with pytest.raises(NormforgeError, match="no kernel has blocks of 128 columns in parts"):
            replace(variant, **changed)


def test_no_kernel_stores_fp8_one_by_one(target: Target) -> None:
    """The narrowest vectors of a block of 32 columns would be the lanes of a warp, one each."""
    variant = small(Problem.parse("4096x1024:fp32", MX), target)
    assert variant.block_columns == 32
    with pytest.raises(NormforgeError, match="no kernel has FP8 in vectors of one element"):
        replace(variant, config={**variant.config, "vector_bytes": 4})
