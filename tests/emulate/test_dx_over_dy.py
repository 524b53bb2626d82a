"""Kernels that write dx over dy, on the CPU: the bits are those of a dx of its own, and no schedule
reads an element of dy after dx has been written there."""

from __future__ import annotations

import re

import pytest
import torch

from generator.emulate import Schedule, find_compiler, run_schedules
from generator.emulate.check import default_residencies, reduced_problem, small_launch
from generator.emulate.run import CallOptions, Layout, Runs
from generator.kernels.render import render
from generator.kernels.variant import Variant
from generator.operations.rmsnorm_backward import Inputs
from generator.problem import Problem
from generator.target import Target
from tests.support.emulator import cancelling_inputs
from tests.support.samples import REDUCTION, in_turn, plain_variant, sample_variant

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

Knobs = dict[str, int | str]

STAGED: list[Knobs] = [
    {"pipeline": pipeline, "reload": reload}
    for pipeline in ("async", "bulk")
    for reload in ("none", "smem")
]
DIRECT: Knobs = {"pipeline": "direct", "reload": "none"}
STAGES: dict[str, int | str] = {"stages": 2}
SCHEDULES = 9
FOUND = r"reads dy\[\d+, \d+\], over which dx has been written"


def run(variant: Variant, inputs: Inputs, source: str, over_dy: bool, pad: int = 0) -> Runs:
    spec, launch = small_launch(variant, len(inputs.x))
    residencies = default_residencies(spec, launch.grid)
    schedules = [Schedule(i, residencies[i % len(residencies)]) for i in range(SCHEDULES)]
    return run_schedules(
        source,
        spec,
        launch,
        inputs,
        schedules if over_dy else schedules[:1],
        layout=Layout((2 * pad, pad, pad)),
        call_options=CallOptions(over={"dx": "dy"} if over_dy else {}),
    )


def check(variant: Variant, problem: Problem, pad: int = 0) -> None:
    inputs = cancelling_inputs(reduced_problem(variant, problem))
    source = render(variant)
    apart, over = (run(variant, inputs, source, over_dy, pad) for over_dy in (False, True))
    assert apart.faults == [] and over.faults == []
    assert len(over.outcomes) == SCHEDULES
    (dx,) = over.results["dx"]
    assert torch.equal(dx, apart.results["dx"][0])
    assert not torch.equal(dx, inputs.dy)
    if variant.determinism != "none":
        (dw,) = over.results["dw"]
        assert torch.equal(dw, apart.results["dw"][0])


@pytest.mark.parametrize(("reduction", "rows"), in_turn([*REDUCTION], inner=[*STAGED, DIRECT]))
def test_dx_over_dy_has_the_bits_of_a_dx_of_its_own(
    reduction: str, rows: Knobs, target: Target
) -> None:
    """This says of direct loads what the source does. It cannot say what the assembler may do."""
    problem = Problem.parse("400x1024:bf16")
    knobs = {**REDUCTION[reduction], **rows, "cluster": 1}
    check(sample_variant(problem, target, len(reduction), **knobs), problem)


WIDE = ["90x4096:bf16", "90x2048:fp32", "90x4096:fp16:fp32"]


@pytest.mark.parametrize(("rows", "shape"), in_turn(STAGED, inner=WIDE))
def test_rows_that_a_cluster_shares(shape: str, rows: Knobs, target: Target) -> None:
    problem = Problem.parse(shape)
    knobs = {"strategy": "column_slices", **rows, "cluster": 2}
    check(sample_variant(problem, target, 1, **knobs), problem)


OTHERS = ["300x256:bf16", "90x1024:bf16+residual", "90x1024:bf16+offset"]


@pytest.mark.parametrize(("rows", "shape"), in_turn(STAGED, inner=OTHERS))
def test_short_rows_options_of_a_kernel_and_rows_with_gaps(
    shape: str, rows: Knobs, target: Target
) -> None:
    problem = Problem.parse(shape)
    check(sample_variant(problem, target, 2, strategy="separate", **rows), problem, pad=64)


@pytest.mark.parametrize(("rows", "strategy"), in_turn(STAGED, inner=["column_slices", "separate"]))
def test_batch_invariant_kernels(strategy: str, rows: Knobs, target: Target) -> None:
    problem = Problem.parse("4500x256:bf16", "rmsnorm_invariant_backward")
    check(sample_variant(problem, target, 3, strategy=strategy, **rows), problem)


READ = "    pipeline.advance();\n"
REFILL = "fetch(schedule.ahead(kAhead), "
AGAIN = "partial[0][0] = __fadd_rn(partial[0][0], element<Element>(dys[0][0].words, 0));\n"
PLANTED = {
    "direct": (READ, "    pipeline.read(xs, dys, batch);\n    " + AGAIN + READ),
    # The batch whose rows are about to be written is copied once more.
    "async": (REFILL, "fetch(schedule.batch, "),
    "bulk": (REFILL, "fetch(schedule.batch, "),
}


@pytest.mark.parametrize("pipeline", PLANTED)
def test_second_read_of_dy_is_found(pipeline: str, target: Target) -> None:
    """The read follows the stores of dx, where a dx of its own would hide it."""
    problem = Problem.parse("42x1024:bf16")
    knobs = {**REDUCTION["last_cta"], "pipeline": pipeline}
    variant = plain_variant(problem, target, **knobs | ({} if pipeline == "direct" else STAGES))
    source, (old, new) = render(variant), PLANTED[pipeline]
    assert source.count(old) == 1
    inputs, planted = cancelling_inputs(problem), source.replace(old, new)
    faults = run(variant, inputs, planted, over_dy=True).faults
    assert faults and all(re.search(FOUND, fault) for fault in faults), faults
    apart = run(variant, inputs, planted, over_dy=False).faults
    assert not any(re.search(FOUND, fault) for fault in apart)
