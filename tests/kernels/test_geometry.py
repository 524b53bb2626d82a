"""Numbers that follow from a config, counted by hand where the templates rely on them."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from generator.emulate.build import find_compiler
from generator.kernels.code_digest import code_digest
from generator.kernels.nvrtc import Compiled
from generator.kernels.ptxas import Resources
from generator.kernels.resource_gate import identity
from generator.kernels.variant import Variant
from generator.paths import template_named
from generator.problem import Problem
from generator.target import find_target
from normforge.spec import CHUNK_ROWS, MAIN_KERNEL
from tests.support.samples import plain_variant, space_of

TARGET = find_target("h200")
INVARIANT = "rmsnorm_invariant_backward"
PROBLEM = Problem.parse("4096x1024:bf16")
FITS = Compiled(TARGET.arch, "", b"cubin", {MAIN_KERNEL: Resources(32, 0, 0, 0)}, "13.0", False, "")


def variant(shape: str = "4096x1024:bf16", **knobs: int | str) -> Variant:
    return plain_variant(shape, TARGET, strategy="separate", **knobs)


def changed(own: Variant, **knobs: int | str) -> Variant:
    """Return the geometry with other values, whether or not a rule allows them."""
    return replace(own, config={**own.config, **knobs})


@pytest.mark.parametrize(
    ("pipeline", "shape", "row"),
    [("bulk", "4096x1024:bf16", 4096), ("async", "4096x1024:fp32", 8192)],
)
def test_stages_hold_x_and_dy_of_every_team(pipeline: str, shape: str, row: int) -> None:
    """row: bytes of a row of x and of one of dy."""
    own = variant(shape, pipeline=pipeline, stages=3, rows_per_cta=2, rows_in_flight=2)
    assert own.tile_bytes == 2 * 3 * 2 * row
    residual = variant(f"{shape}+residual", pipeline=pipeline, stages=3, rows_per_cta=2)
    assert residual.tile_bytes == 2 * 3 * row * 3 // 2


@pytest.mark.parametrize(("threads", "in_flight", "rows"), [(32, 1, 1), (32, 2, 2), (8, 1, 4)])
def test_a_launch_counts_all_rows_of_a_batch(threads: int, in_flight: int, rows: int) -> None:
    """Rows of less than a warp lie side by side in it."""
    own = changed(variant(), threads_per_row=threads, rows_in_flight=in_flight)
    assert own.spec(132).batch_rows == rows


def test_one_measurement_serves_equal_code_at_equal_launches_only() -> None:
    one, two = (variant(ctas_per_sm=count) for count in (1, 2))
    few = Problem.parse("64x1024:bf16")
    assert identity(one, FITS, PROBLEM, TARGET) != identity(two, FITS, PROBLEM, TARGET)
    assert identity(one, FITS, few, TARGET) == identity(two, FITS, few, TARGET)


@pytest.mark.parametrize(
    ("strategy", "known"),
    [
        ("separate", "18ea9473876b7741"),
        ("semaphore", "f74e5b6732f7cb30"),
        ("atomic", "ab8881bd7e018588"),
    ],
)
def test_work_has_the_name_that_it_has_in_stored_records(strategy: str, known: str) -> None:
    """Else a study that goes on measures it again."""
    own = plain_variant(PROBLEM, TARGET, strategy=strategy)
    assert identity(own, FITS, PROBLEM, TARGET) == known


def test_the_compilers_options_are_a_part_of_the_code() -> None:
    free, capped = variant(), changed(variant(), register_cap=64)
    assert code_digest(free, "sm_90a") != code_digest(capped, "sm_90a")
    assert code_digest(free, "sm_90a") != code_digest(free, "sm_100a")


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
def test_tail_of_groups_has_the_shared_memory_that_its_threads_use(tmp_path: Path) -> None:
    """The template and the host count alike, for every CTA and slice that the space has."""
    source = template_named("sum_groups.cuh").read_text()
    shape = re.search(r"DEVICE constexpr int power_below.*?^template.*?^};", source, re.M | re.S)
    assert shape is not None
    space = space_of(INVARIANT)
    values = {knob.name: knob.values for knob in space.knobs}
    cases = [
        (group_rows, threads, width)
        for group_rows in values["group_rows"]
        for threads in range(32, 1025, 32)
        for width in values["slice_columns"]
        if isinstance(width, int) and width and width <= 4 * threads
    ]
    assert len(cases) > 300
    program = ["#include <cstdio>", "#define DEVICE"]
    for group_rows in values["group_rows"]:
        groups = f"constexpr int kGroupsOfChunk = {CHUNK_ROWS} / {group_rows};"
        program += [f"namespace g{group_rows} {{", groups, shape[0], "}"]
    program.append("int main() {")
    for group_rows, threads, width in cases:
        floats = f"g{group_rows}::Lanes<{threads}, {width}>::kFloats"
        program.append(f'  std::printf("%d\\n", {floats});')
    (tmp_path / "lanes.cpp").write_text("\n".join([*program, "}"]))
    build = [str(find_compiler()), "-std=c++17", "-o", "lanes", "lanes.cpp"]
    subprocess.run(build, cwd=tmp_path, check=True, timeout=100)
    done = subprocess.run(["./lanes"], cwd=tmp_path, capture_output=True, text=True, check=True)
    problem = Problem.parse("65536x1024:bf16", INVARIANT)
    own = plain_variant(problem, TARGET, strategy="column_slices")
    for (group_rows, threads, width), floats in zip(cases, done.stdout.split(), strict=True):
        knobs = {"group_rows": group_rows, "threads_per_row": 32, "rows_per_cta": threads // 32}
        tail = changed(own, slice_columns=width, **knobs)
        assert (tail.threads, tail.tail_columns) == (threads, width)
        assert tail.tail_bytes == 4 * int(floats), (group_rows, threads, width)
