"""RMSNorm that is added to a residual stream, in the emulator: every pipeline against float64,
under many schedules."""

from __future__ import annotations

import pytest
import torch

from generator.emulate import find_compiler
from generator.emulate.check import CPU
from generator.operations import RMSNORM_ADD_FORWARD
from generator.problem import Problem
from generator.target import Target
from tests.support.emulator import run_to_one_result, small

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

NAME = RMSNORM_ADD_FORWARD.name


def problem_of(shape: str) -> Problem:
    return Problem.parse(shape, NAME)


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
