"""Variants and inputs for tests of the CPU emulator, and runs that must have one result."""

from __future__ import annotations

from dataclasses import replace

import torch

from generator.emulate import Schedule, run_schedules
from generator.emulate.check import CPU, small_launch
from generator.emulate.run import CallOptions
from generator.kernels.render import render
from generator.kernels.variant import Variant
from generator.operations import operation_of
from generator.operations.rmsnorm_backward import Inputs
from generator.problem import Problem
from generator.target import Target
from tests.support.samples import BY_TEMPLATE, REDUCTION, legal_variant, plain_variant

WITHOUT_DX, WITHOUT_DW = (CallOptions(without=frozenset({name})) for name in ("dx", "dw"))


def small_variant(shape: str, reduction: str, target: Target, **knobs: int | str) -> Variant:
    """A plain variant with this reduction; a second kernel is small, for speed."""
    knobs = {**REDUCTION[reduction], **knobs}
    if BY_TEMPLATE[reduction].launches > 1:
        knobs |= {"slice_columns": 128, "sum_threads": 128}
    return plain_variant(shape, target, **knobs)


def legal(problem: Problem, target: Target, **knobs: int | str) -> Variant | str:
    """Return a plain variant, chosen as for many rows, or what its space has against it. Its sums
    over the rows, where there are any, are those of column slices if no strategy is given."""
    strategy = "column_slices" if operation_of(problem).sums_rows else "none"
    return legal_variant(replace(problem, M=4096), target, **{"strategy": strategy, **knobs})


def small(problem: Problem, target: Target, **knobs: int | str) -> Variant:
    """Return what `legal` does of knobs that are legal."""
    found = legal(problem, target, **knobs)
    assert isinstance(found, Variant), found
    return found


def cancelling_inputs(problem: Problem) -> Inputs:
    """Inputs with whose dw any other order of additions shows."""
    operation = operation_of(problem)
    found: Inputs = operation.make_cancelling(problem, operation.make_inputs(problem, CPU))
    return found


def run_to_one_result(
    variant: Variant, inputs: Inputs, call_options: CallOptions | None = None
) -> dict[str, torch.Tensor]:
    """The outputs of four schedules, which find nothing and agree in every bit."""
    spec, launch = small_launch(variant, len(inputs.x))
    schedules = [Schedule(seed, launch.grid) for seed in range(4)]
    runs = run_schedules(
        render(variant), spec, launch, inputs, schedules, call_options=call_options
    )
    assert runs.faults == []
    assert runs.distinct_results == 1
    return {name: result for name, (result,) in runs.results.items()}
