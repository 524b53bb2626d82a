"""In the emulator, stages hold what the rows of a group share: no result changes, and the barriers
and fences that this takes are needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from generator.emulate import check_variant, find_compiler
from generator.emulate.check import CPU, check_source, small_launch
from generator.kernels.render import render
from generator.kernels.variant import Variant
from generator.operations import OPERATIONS
from generator.problem import Problem
from generator.target import Target
from tests.support.emulator import run_to_one_result, small
from tests.support.rotated import BACKWARD, FORWARD, HEADS, WIDE, at_strides

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

SEVERAL: dict[str, Any] = {"rows_in_flight": 2, "reload": "smem", "stages": 3}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bulk": (f"{BACKWARD}:801x1024:bf16+joined128", {"pipeline": "bulk", **WIDE}),
    "bulk, several rows": (
        f"{FORWARD}:801x1024:bf16+joined128",
        {"pipeline": "bulk", **WIDE, **SEVERAL},
    ),
    "bulk, heads": (
        f"{FORWARD}:1024x128:bf16+rotary32",
        {"pipeline": "bulk", **HEADS, "threads_per_row": 32},
    ),
    "bulk, alone": ("rope:1024x512:bf16", {"pipeline": "bulk", **HEADS, "threads_per_row": 32}),
    "producer": (f"{FORWARD}:400x2048:bf16+joined128", {"pipeline": "producer", **WIDE}),
    "producer, several rows": (
        f"{BACKWARD}:401x2048:bf16+joined128",
        {"pipeline": "producer", **WIDE, **SEVERAL, "rows_per_cta": 2},
    ),
    "producer, fp32": (f"{BACKWARD}:801x1024:fp32+joined128", {"pipeline": "producer", **WIDE}),
    "neighbours": (f"{BACKWARD}:800x1024:bf16+joined128+interleaved", {"pipeline": "bulk", **WIDE}),
    "async, joined": (
        f"{BACKWARD}:801x1024:bf16+joined128",
        {"pipeline": "async", **WIDE, "rows_in_flight": 2},
    ),
    "async, joined, side by side": (
        f"{BACKWARD}:801x512:bf16+joined128",
        {"pipeline": "async", **HEADS, "threads_per_row": 16},
    ),
    "heads": (f"{BACKWARD}:1024x128:bf16", {"pipeline": "async", **HEADS}),
    "heads, several rows": (f"{BACKWARD}:1024x128:bf16", {"pipeline": "async", **HEADS, **SEVERAL}),
    "heads, whole warps": (
        f"{BACKWARD}:1024x512:bf16",
        {"pipeline": "async", **HEADS, "threads_per_row": 32},
    ),
    "heads of several groups": (f"{BACKWARD}:1203x128:bf16", {"pipeline": "async", **HEADS}),
    "rotary": (f"{FORWARD}:1024x128:bf16+rotary64", {"pipeline": "async", **HEADS}),
    "alone": ("rope:1024x128:bf16+interleaved", {"pipeline": "async", **HEADS}),
    "alone, uneven": ("rope:1024x96:bf16", {"pipeline": "async", **HEADS, "threads_per_row": 6}),
    "alone, fp32": ("rope:1024x128:fp32", {"pipeline": "async", **HEADS}),
}


def case(name: str, target: Target, groups_in: str) -> tuple[Problem, Variant]:
    shape, knobs = CASES[name]
    problem = Problem.parse(shape)
    return problem, small(problem, target, **{"stages": 2, **knobs}, groups_in=groups_in)


@pytest.mark.parametrize("name", CASES)
def test_no_bit_depends_on_where_numbers_wait(name: str, target: Target) -> None:
    problem, staged = case(name, target, "smem")
    _, plain = case(name, target, "registers")
    assert "copy_numbers<" in render(staged) or "bulk_load_numbers(" in render(staged)
    assert staged.smem_bytes > plain.smem_bytes
    given = OPERATIONS[problem.operation].make_inputs(problem, CPU)
    for dtype in {torch.float32, given.x.dtype}:
        inputs = at_strides(given, dtype)
        expected, found = run_to_one_result(plain, inputs), run_to_one_result(staged, inputs)
        assert all(torch.equal(found[output], expected[output]) for output in expected)
    assert check_variant(staged, problem, schedules=2, seed=2026, all_rows=True).problems == ()


def said_of(name: str, target: Target, *changes: tuple[str, str]) -> str:
    """Return what the emulator has against a case's kernel with these changes of its source."""
    problem, variant = case(name, target, "smem")
    source = render(variant)
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    spec, launch = small_launch(variant, problem.M)
    return "; ".join(check_source(source, spec, launch, problem, schedules=4).problems)


WAITS = "if constexpr (kSharing > 1) warp_barrier();"
FAULTS = {
    "others' copies are not waited for": ("heads", (WAITS, "")),
    "copies replace what others still read": (
        "alone",
        ("warp_barrier();  // all have read what is replaced", ""),
    ),
    "a producer's reader does not fence": (
        "producer",
        ("  DEVICE void release() {\n    fence_async_shared();", "  DEVICE void release() {"),
    ),
    "a stage has the numbers of another row": (
        "producer, several rows",
        (
            "rows.arguments, row + u, rows.arguments.sin_stride",
            "rows.arguments, row, rows.arguments.sin_stride",
        ),
    ),
    "fewer bytes are waited for": (
        "bulk",
        ("groups * 2 * group_bytes", "groups * group_bytes"),
    ),
    "numbers past the last row are read": ("heads", ("if (row >= rows.count) continue;", "")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_finds_a_fault(fault: str, target: Target) -> None:
    name, change = FAULTS[fault]
    assert said_of(name, target) == ""
    assert said_of(name, target, change) != ""
