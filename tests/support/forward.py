"""Tests of the forward share these helpers: variants by fields, and what is wrong with outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from generator.evaluate.verify.accuracy import compare_all
from generator.kernels.forward import ForwardVariant
from generator.kernels.nvrtc import Compiled
from generator.kernels.ptxas import Resources
from generator.kernels.variant import AnyVariant
from generator.operations import RMSNORM_FORWARD
from generator.operations.rmsnorm_forward import ForwardInputs
from generator.problem import Problem
from generator.space.forward_space import forward_variants
from generator.target import Target, find_target
from normforge.spec import FORWARD_KERNELS
from tests.support.synthetic import FakePool

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


class InstantPool(FakePool):
    """One that compiles forwards, too, at once: the cubin is the name."""

    def code(self, variant: AnyVariant) -> str:
        return variant.id if isinstance(variant, ForwardVariant) else super().code(variant)

    def _compile(self, variant: AnyVariant) -> Compiled:
        if not isinstance(variant, ForwardVariant):
            return super()._compile(variant)
        kernels = dict.fromkeys(FORWARD_KERNELS, Resources(32, 0, 0, 0))
        return Compiled(H200.arch, "", variant.id.encode(), kernels, "0", False, "")


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
    """Say what is wrong with y, rstd and residual_out; "" for nothing. The residual takes part
    where there is a third output."""
    if not isinstance(outputs, Mapping):
        outputs = dict(zip(("y", "rstd", "residual_out"), outputs, strict=False))
    outputs = {**outputs, "rstd": outputs["rstd"].reshape(-1)}
    given = inputs if "residual_out" in outputs else replace(inputs, residual=None)
    return compare_all(outputs, RMSNORM_FORWARD.bounds(problem, given)).fault
