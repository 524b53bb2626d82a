"""Gated RMSNorms in the emulator: gates of any size, and what PyTorch computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from generator.emulate import find_compiler
from generator.emulate.check import CPU
from generator.operations import GATED_BACKWARDS, GATED_FORWARDS, OPERATIONS
from generator.operations.rows import make_reference
from generator.problem import Problem
from generator.target import Target
from normforge import operations as library
from normforge.operations.gated_rmsnorm_backward import gated_rmsnorm
from tests.support.emulator import run_to_one_result, small
from tests.support.samples import plain_variant

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

KINDS = {one.name: kind for kind, one in library.GATED_FORWARDS.items()}
GATES = torch.tensor(
    [0.0, -0.0, 1e-30, 0.5, -3, 8, -8, 20, -20, 60, -60, 86, -86, 200, torch.finfo().min, 1e6]
)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("operation", [*GATED_FORWARDS, *GATED_BACKWARDS], ids=lambda o: o.name)
def test_gates_of_any_size_have_their_value_and_slope(
    operation: Any, dtype: str, target: Target
) -> None:
    """Gates beyond 87 have those of 87, or none: what is left of a sigmoid there is 1e-38."""
    problem = Problem.parse(f"16x64:{dtype}", operation.name)
    given = operation.make_inputs(problem, CPU)
    least = torch.finfo(given.z.dtype).min
    z = GATES.clamp(min=least).repeat(4).expand(16, 64).to(given.z.dtype)
    inputs = replace(given, x=given.x.sign() * (1 + given.x.abs()), z=z.contiguous())
    strategy = "column_slices" if operation.sums_rows else "none"
    knobs = {"threads_per_row": 8, "rows_per_cta": 4, "strategy": strategy}
    found = run_to_one_result(plain_variant(problem, target, **knobs), inputs)
    reference = make_reference(library.OPERATIONS[operation.name], problem, inputs)
    unit = 0.0 if dtype == "fp32" else 2.0**-8
    for out, exact in reference.outputs.items():
        off = (found[out].double() - exact).abs()
        bound = unit * exact.abs() + 1e-5 * reference.scales[out].double() + 1e-30
        assert torch.all(off <= bound), out
        assert found[out].isfinite().all()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("name", KINDS)
def test_gates_that_are_no_numbers_give_what_pytorch_gives(
    name: str, value: float, target: Target
) -> None:
    problem = Problem.parse("16x64:bf16", name)
    given = OPERATIONS[name].make_inputs(problem, CPU)
    given.z[3, 5] = value
    variant = plain_variant(problem, target, threads_per_row=8, rows_per_cta=4, strategy="none")
    found = run_to_one_result(variant, given)["y"]
    wanted = gated_rmsnorm(given.x, given.z, given.weight, given.eps, *KINDS[name])
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.isinf(), wanted.isinf())


@pytest.mark.parametrize("name", KINDS)
def test_it_is_what_pytorch_computes(name: str, target: Target) -> None:
    """PyTorch's norm and activations stand beside the formula of the operation."""
    problem = Problem.parse("42x1024:fp32", name)
    inputs = OPERATIONS[name].make_inputs(problem, CPU)
    activation, norm_before_gate = KINDS[name]
    act = torch.nn.functional.silu if activation == "silu" else torch.sigmoid
    x, gate, weight = inputs.x.double(), act(inputs.z.double()), inputs.weight.double()
    rows = x if norm_before_gate else x * gate
    wanted = torch.nn.functional.rms_norm(rows, (1024,), weight, inputs.eps)
    wanted = wanted * gate if norm_before_gate else wanted
    variant = small(problem, target)
    found = run_to_one_result(variant, inputs)["y"].double()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_errors_are_at_most_those_of_eager_code(name: str, target: Target) -> None:
    problem = Problem.parse("97x128:bf16", name)
    inputs = OPERATIONS[name].make_inputs(problem, CPU)
    variant = small(problem, target, threads_per_row=16, rows_per_cta=8)
    found = run_to_one_result(variant, inputs)["y"]
    given = (inputs.x, inputs.z, inputs.weight)
    exact = gated_rmsnorm(*(one.double() for one in given), inputs.eps, *KINDS[name])
    wide = (one.float() for one in given)
    eager = gated_rmsnorm(*wide, inputs.eps, *KINDS[name]).to(torch.bfloat16)
    error, bar = ((one.double() - exact).norm() for one in (found, eager))
    assert error <= 1.001 * bar
