"""Batches that end within a run, a group and a chunk: the rows at the end count like all others."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from generator.emulate.build import find_compiler
from generator.emulate.check import small_launch
from generator.emulate.run import CallOptions, Schedule, run_schedules
from generator.kernels.render import render
from generator.kernels.variant import make_variant
from generator.operations import operation_of
from generator.problem import Problem
from normforge.launch.kernel_arguments import DW_IN_FP32
from normforge.spec import CHUNK_ROWS
from tests.support.forward import H200
from tests.support.samples import space_of

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")


@pytest.mark.parametrize("pipeline", ["bulk", "async"])
@pytest.mark.parametrize("strategy", ["separate", "column_slices"])
@pytest.mark.parametrize("leaves", ["groups", "both"])
def test_rows_behind_the_last_whole_run_are_a_run(
    strategy: str, leaves: str, pipeline: str
) -> None:
    """The rows hold integers, so that dw is exact in any order."""
    problem = Problem(1, 256, "bf16", "bf16", operation="rmsnorm_invariant_backward")
    order = space_of(problem.operation).fixed_for(problem)
    slab = CHUNK_ROWS // order["group_rows"] * order["run_rows"]
    # Whole runs, and behind them 20 strips and one of six rows.
    M = 2 * CHUNK_ROWS + slab + 20 * order["rows_per_cta"] + 6
    problem = replace(problem, M=M)
    fixed = {"strategy": strategy, "leaves": leaves, "pipeline": pipeline, "rows_in_flight": 1}
    config = space_of(problem.operation).sample(problem, H200, random.Random(3), fixed)
    variant = make_variant(config, problem)
    assert M % variant.teams == 6
    drawn = operation_of(problem).make_inputs(problem, torch.device("cpu"))
    x = torch.arange(M * 256).view(M, 256) % 7 - 3
    dy = torch.arange(M * 256).view(M, 256) % 5 + 1
    inputs = replace(drawn, x=x.bfloat16(), dy=dy.bfloat16(), rstd=torch.ones(M))
    spec, launch = small_launch(variant, M, 3)
    runs = run_schedules(
        render(variant),
        spec,
        launch,
        inputs,
        [Schedule(0, launch.grid)],
        call_options=CallOptions(dw_mode=DW_IN_FP32),
    )
    assert runs.faults == []
    assert torch.equal(runs.results["dw"][0], (x * dy).sum(0).float())
