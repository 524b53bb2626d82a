"""In the emulator, the L2 is asked ahead for what the rows of a group share: no result changes, and
what is asked for are the numbers of a later batch, all of them, and nothing past the last one."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from generator.emulate import Schedule, check_variant, find_compiler, run_schedules
from generator.emulate.check import CPU, check_source, small_launch
from generator.kernels.render import render
from generator.kernels.variant import Variant
from generator.operations import OPERATIONS
from generator.problem import Problem
from generator.target import Target
from tests.support.emulator import run_to_one_result, small
from tests.support.rotated import BACKWARD, FORWARD, HEADS, WIDE, at_strides

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bulk": (f"{BACKWARD}:800x1024:bf16+joined128", {"pipeline": "bulk", **WIDE}),
    "producer": (f"{FORWARD}:400x2048:bf16+joined128", {"pipeline": "producer", **WIDE}),
    "neighbours": (f"{BACKWARD}:800x1024:bf16+joined128+interleaved", {"pipeline": "bulk", **WIDE}),
    "heads": (f"{BACKWARD}:1203x128:bf16", {"pipeline": "async", **HEADS}),
    "several": (f"{BACKWARD}:1203x128:bf16", {"pipeline": "async", **HEADS, "rows_in_flight": 2}),
    "rotary": (f"{FORWARD}:1203x128:bf16+rotary64", {"pipeline": "async", **HEADS}),
    "alone": ("rope:1203x128:bf16+interleaved", {"pipeline": "async", **HEADS}),
}


def case(name: str, target: Target, ahead: int) -> tuple[Problem, Variant]:
    shape, knobs = CASES[name]
    problem = Problem.parse(shape)
    return problem, small(problem, target, stages=2, groups_ahead=ahead, **knobs)


@pytest.mark.parametrize("name", CASES)
def test_no_bit_depends_on_it(name: str, target: Target) -> None:
    problem, plain = case(name, target, 0)
    inputs = OPERATIONS[problem.operation].make_inputs(problem, CPU)
    expected = run_to_one_result(plain, inputs)
    for ahead in (2, 8):
        _, variant = case(name, target, ahead)
        check = check_variant(variant, problem, schedules=2, seed=2026, all_rows=True)
        assert check.problems == ()
        found = run_to_one_result(variant, inputs)
        assert all(torch.equal(found[output], expected[output]) for output in expected)


@pytest.mark.parametrize("name", CASES)
def test_a_batch_past_the_last_one_is_not_asked_for(name: str, target: Target) -> None:
    problem, variant = case(name, target, 4)
    source, guard = render(variant), "if (batch >= rows.batches) return;\n  constexpr int kApart"
    assert guard in source
    past = source.replace(guard, "constexpr int kApart").replace(
        "if (!rows.has(row)) continue;", ""
    )
    spec, launch = small_launch(variant, problem.M)
    said = check_source(past, spec, launch, problem, schedules=1).problems
    assert any(re.search(r"reads \d+ bytes at (cos|sin)\[", each) for each in said), said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_each_number_of_a_later_batch_is_asked_for(
    name: str, dtype: torch.dtype, target: Target
) -> None:
    """A kernel that takes zeros for what nobody has asked for is right, and one that asks for less
    is not. A team's first batch is loaded without, and its second perhaps before it is asked for:
    there is no barrier between."""
    problem, variant = case(name, target, 4)
    inputs = at_strides(OPERATIONS[problem.operation].make_inputs(problem, CPU), dtype)
    expected = run_to_one_result(variant, inputs)
    source = render(variant)
    assert "prefetch.global.L2 [" in source
    for old, new in (
        ("prefetch_l2(", "ask("),
        ("      into[u][j] = GroupPacket{};\n", "      into[u][j] = GroupPacket{};\n" + WITHOUT),
    ):
        assert old in source
        source = source.replace(old, new)
    source = source.replace("// ---- What the rows", f"{ASK}\n// ---- What the rows")

    def is_right(source: str) -> bool:
        spec, launch = small_launch(variant, problem.M)
        runs = run_schedules(source, spec, launch, inputs, [Schedule(0, launch.grid)])
        assert runs.faults == []
        return all(torch.equal(runs.results[name][0], expected[name]) for name in expected)

    assert is_right(source)
    for asked, less in (
        ("if (column >= kApart) continue;", "if (column > 0) continue;"),
        ("schedule.ahead(i)", "schedule.ahead(9 * i)"),
    ):
        assert asked in source
        assert not is_right(source.replace(asked, less)), less


ASK = """#include <set>
static std::set<const void*> asked;
inline void ask(const void* address) { asked.insert(address); }"""
WITHOUT = """      const void* address = static_cast<const char*>(from) + at * (rows.wide ? 4 : 2);
      if (batch >= 2 * gridDim.x * kTeams && asked.count(address) == 0) continue;
"""
