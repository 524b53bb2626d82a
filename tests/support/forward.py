"""What the tests of the forward share: variants by their fields, and what is wrong with outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from generator.evaluate.verify.accuracy import compare_all
from generator.kernels.forward import ForwardVariant
from generator.operations import RMSNORM_FORWARD
from generator.operations.rmsnorm_forward import ForwardInputs
from generator.problem import Problem
from generator.space.forward_space import forward_variants
from generator.target import Target, find_target

H200 = find_target("h200")
EPS = 1e-6


def of_kind(shape: str, target: Target = H200, **wanted: Any) -> ForwardVariant:
    """The preferred variant of a shape with these fields; `walks` says whether its CTAs do."""
    walks = wanted.pop("walks", None)
    for variant in forward_variants(Problem.parse(shape), target):
        if walks is not None and walks != (variant.ctas_per_sm > 0):
            continue
        if all(getattr(variant, name) == value for name, value in wanted.items()):
            return variant
    raise AssertionError(f"{shape} has no variant with {wanted}")


def drawn(problem: Problem, M: int, device: str = "cpu") -> ForwardInputs:
    """M rows and a residual for them."""
    shape = replace(problem, M=M, residual=problem.dtype)
    made: ForwardInputs = RMSNORM_FORWARD.make_inputs(shape, torch.device(device))
    return made


def output_fault(
    problem: Problem,
    inputs: ForwardInputs,
    outputs: Mapping[str, torch.Tensor] | Sequence[torch.Tensor],
) -> str:
    """What is wrong with y, rstd and residual_out; "" for nothing. The residual takes part where
    there is a third output."""
    if not isinstance(outputs, Mapping):
        outputs = dict(zip(("y", "rstd", "residual_out"), outputs, strict=False))
    outputs = {**outputs, "rstd": outputs["rstd"].reshape(-1)}
    given = inputs if "residual_out" in outputs else replace(inputs, residual=None)
    return compare_all(outputs, RMSNORM_FORWARD.bounds(problem, given)).fault
