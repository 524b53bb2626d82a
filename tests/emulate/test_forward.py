"""Forward kernels on the CPU: accurate, of one result under all schedules, for any row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from generator.emulate import forward as emulated
from generator.emulate.build import find_compiler
from generator.emulate.forward import run_forward
from generator.emulate.run import Layout, Schedule
from generator.kernels.forward import (
    ANY_COLUMNS,
)
from generator.kernels.render import render_forward
from generator.operations import RMSNORM_FORWARD
from generator.problem import Problem
from generator.space.forward_space import fallback_forwards
from tests.support.forward import drawn, of_kind, output_fault

SCHEDULES = [Schedule(1, 2), Schedule(2, 5), Schedule(3, 1000)]

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

KINDS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "several rows in a warp": ("4096x64:bf16", 45, {"walks": False}),
    "a warp for a row": ("4096x256:fp16", 37, {"threads_per_row": 32, "rows_in_flight": 2}),
    "walking CTAs": ("4096x512:bf16:fp32", 33, {"walks": True}),
    "several warps and rows": ("4096x3072:bf16", 11, {"rows_per_cta": 2, "walks": True}),
    "one row, fp32": ("4096x4096:fp32", 5, {"walks": False}),
    "odd row length": ("4096x1001:bf16", 9, {}),
    "read twice": ("4096x16384:bf16", 5, {"form": "twice", "walks": True}),
    "cluster": ("4096x16384:bf16", 5, {"cluster": 4, "walks": True}),
}


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_kernel_is_accurate_and_has_one_result_under_all_schedules(kind: str) -> None:
    shape, M, wanted = KINDS[kind]
    variant = of_kind(shape, **wanted)
    problem = replace(Problem.parse(shape), M=M)
    inputs = drawn(problem, M)
    runs = run_forward(variant, replace(inputs, residual=None), SCHEDULES)
    assert runs.faults == []
    assert len(runs.results) == 1
    assert output_fault(problem, inputs, runs.results[0]) == ""
    shifted = replace(inputs, weight=None, offset=1.0)
    runs = run_forward(variant, shifted, SCHEDULES[:2], layout=Layout((16, 8)))
    assert runs.faults == []
    assert output_fault(problem, shifted, runs.results[0]) == ""


@needs_compiler
def test_packed_rows_are_read_in_place() -> None:
    variant = of_kind("4096x128:bf16")
    problem = Problem(60, 128, "bf16", "bf16")
    inputs = drawn(problem, 60)
    runs = run_forward(variant, replace(inputs, residual=None), SCHEDULES[:1], inner=4)
    assert runs.faults == []
    assert output_fault(problem, inputs, runs.results[0]) == ""


@needs_compiler
@pytest.mark.parametrize(
    ("N", "vector_bytes"), [(40, 16), (9000, 16), (1, 2), (3, 2), (999, 2), (1000, 2)]
)
def test_fallback_kernels_serve_any_row_length(N: int, vector_bytes: int) -> None:
    M = 5
    problem = Problem(M, N, "bf16", "bf16")
    inputs = drawn(problem, M)
    fitting = [
        v
        for v in fallback_forwards((("bf16", "bf16"),))
        if v.vector_bytes == vector_bytes and v.N >= N
    ]
    assert fitting[-1].N == ANY_COLUMNS
    for variant in (fitting[0], fitting[-1]):
        runs = run_forward(variant, replace(inputs, residual=None), SCHEDULES[:1])
        assert runs.faults == []
        assert output_fault(problem, inputs, runs.results[0]) == "", str(variant)


@needs_compiler
def test_bits_of_a_row_depend_neither_on_the_grid_nor_on_the_other_rows() -> None:
    variant = of_kind("4096x512:bf16", walks=True)
    inputs = replace(drawn(Problem.parse("1x512:bf16"), 37), residual=None)
    fewer = replace(inputs, x=inputs.x[20:].clone())
    (first,) = run_forward(variant, inputs, SCHEDULES[:1], sms=1).results
    (other,) = run_forward(variant, inputs, SCHEDULES[:1], sms=3).results
    (part,) = run_forward(variant, fewer, SCHEDULES[:1]).results
    assert first.keys() == {"y", "rstd"}
    for name, whole in first.items():
        assert torch.equal(whole, other[name])
        assert torch.equal(whole[20:], part[name])


@pytest.mark.parametrize("bad", [False, True])
def test_results_that_change_without_a_residual_alone_are_found(
    monkeypatch: pytest.MonkeyPatch, bad: bool
) -> None:
    def run(variant: Any, inputs: Any, schedules: Any, *, sms: int) -> emulated.ForwardRuns:
        exact = RMSNORM_FORWARD.bounds(problem, inputs)
        one = {name: bound.reference.clone() for name, bound in exact.items()}
        one["y"] = one["y"].bfloat16()
        count = 2 if bad and inputs.residual is None else 1
        return emulated.ForwardRuns([one] * count, [])

    variant, problem = of_kind("4096x256:bf16"), Problem.parse("7x256:bf16")
    monkeypatch.setattr(emulated, "run_forward", run)
    monkeypatch.setattr(emulated, "find_compiler", lambda: "g++")
    check = emulated.check_forward(variant, problem)
    assert check.distinct_results == 1 + bad
    changes = ("its bits change from schedule to schedule",)
    assert check.problems == (changes if bad else ())


@needs_compiler
def test_the_emulator_finds_a_missing_barrier_and_a_wrong_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variant = of_kind("4096x3072:bf16", rows_per_cta=2, walks=True)
    problem = replace(Problem.parse("4096x3072:bf16"), M=11)
    inputs = replace(drawn(problem, 11), residual=None)

    def mutated(old: str, new: str) -> emulated.ForwardRuns:
        source = render_forward(variant)
        assert source.count(old) == 1, f"the templates no longer have {old!r}"
        monkeypatch.setattr(emulated, "render_forward", lambda v: source.replace(old, new))
        return run_forward(variant, inputs, SCHEDULES)

    barrier = "      cta_barrier();\n#pragma unroll\n      for (int u = 0; u < kRowsInFlight; ++u)"
    assert mutated(barrier, barrier.replace("cta_barrier();", "")).faults
    runs = mutated("store_rstd(rows.rstd + row, rstd)", "store_rstd(rows.rstd + (row ^ 1), rstd)")
    assert len(runs.faults) == len(SCHEDULES)
    assert any("out of bounds: writes 4 bytes at rstd[11]" in fault for fault in runs.faults)
    runs = mutated("store_rstd(rows.rstd + row, rstd)", "store_rstd(rows.rstd + row / 2, rstd)")
    assert any("a second time" in fault and "rstd[" in fault for fault in runs.faults)
