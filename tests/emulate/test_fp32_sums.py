"""Rounding errors of dw in fp32: rows add up in blocks, teams and tails in pairs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.errors import composite, errors, executed, in_fp32
from generator.emulate import find_compiler
from generator.emulate.check import CPU, check_variant, small_launch
from generator.kernels.geometry import BLOCK_ROWS
from generator.kernels.render import render
from generator.kernels.variant import Variant
from generator.problem import Problem
from generator.target import Target
from tests.support.samples import DETERMINISTIC, REDUCTION, in_turn, plain_variant

SCALAR = {"threads_per_row": 32, "rows_per_cta": 8}
PART_OF_A_WARP = {"threads_per_row": 8}
CLUSTER = {"threads_per_row": 256, "rows_per_cta": 1, "rows_in_flight": 4, "cluster": 2}
BULK = {"pipeline": "bulk", "stages": 2, "threads_per_row": 32, "rows_per_cta": 8}


@pytest.mark.parametrize("in_blocks", [True, False])
def test_who_has_no_room_for_blocks_has_none(in_blocks: bool, target: Target) -> None:
    variant = plain_variant("43x1024:bf16", target, rows_in_flight=4)
    variant = replace(variant, in_blocks=in_blocks)
    assert ("blocks.end_batch(partial);" in render(variant)) == in_blocks
    assert bool(variant.block_sums_bytes) == in_blocks
    assert variant.block_batches == (BLOCK_ROWS // 4 if in_blocks else 0)


def dw_errors(
    variant: Variant, problem: Problem, participants: int, *sources: str
) -> tuple[float, ...]:
    """Relative errors of dw in fp32 against float64 on random normal rows: of sources of the
    variant, and last of PyTorch's operations one after another."""
    spec, launch = small_launch(variant, problem.M, participants)
    calls = {source: executed(source, spec, launch, dw_in_fp32=True) for source in sources}
    found = errors(problem, {**calls, "composite": in_fp32(composite)}, CPU)
    return tuple(found[name]["dw"] for name in (*sources, "composite"))


def in_a_row(source: str) -> str:
    """Return the source of the same kernel with all rows of a thread added one after another."""
    return source.replace("    blocks.end_batch(partial);\n", "")


@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("shape", "knobs"),
    [
        ("4801x128:fp32", BULK),
        ("4801x128:fp32", {"threads_per_row": 32, "rows_in_flight": 4}),
        ("4801x256:bf16:fp32", {"threads_per_row": 32}),
        ("1201x4096:bf16", {**CLUSTER, "pipeline": "bulk", "stages": 2}),
        ("4801x77:fp32", SCALAR),
        ("19201x64:fp32", PART_OF_A_WARP),
    ],
)
def test_many_rows_of_a_team_cost_little(
    shape: str, knobs: dict[str, int | str], target: Target
) -> None:
    """The error at 300 rows for each of 16 teams (150 for 8 clusters) is about that of PyTorch's
    operations on the CPU, which add in pairs; one after another it is a third larger at least."""
    problem = Problem.parse(shape)
    strategy = {"strategy": "column_slices", "rows_per_cta": 8}
    variant = plain_variant(problem, target, **{**strategy, **knobs})
    source = render(variant)
    assert in_a_row(source) != source
    participants = 16 // variant.teams // variant["cluster"]
    blocked, plain, pytorch = dw_errors(variant, problem, participants, source, in_a_row(source))
    assert blocked <= 1.1 * pytorch
    assert plain > 1.35 * blocked


@pytest.mark.sampled(3)
@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("reduction", "shape"),
    in_turn(DETERMINISTIC, inner=["701x256:fp32", "701x250:bf16:fp32", "701x256:bf16"]),
)
def test_blocks_lose_nothing(reduction: str, shape: str, target: Target) -> None:
    """Closed blocks, one under way, and teams that have none."""
    variant = plain_variant(shape, target, **REDUCTION[reduction], **SCALAR)
    for M in (1, 16 * 40, 16 * 40 + 1, 701):  # 40 teams
        check_rows(variant, M)


@pytest.mark.sampled(1)
@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("reduction", "pipeline"),
    [("separate", "direct"), ("column_slices", "async"), ("mailbox", "bulk")],
)
def test_blocks_of_clusters_lose_nothing(reduction: str, pipeline: str, target: Target) -> None:
    """They end while the sums of the next rows travel; batches of four rows, blocks of four
    batches, five clusters."""
    stages = 1 if pipeline == "direct" else 2
    variant = plain_variant(
        "181x4096:bf16", target, **REDUCTION[reduction], **CLUSTER, pipeline=pipeline, stages=stages
    )
    for batches in (0, 1, 3, 4, 5, 8, 9):
        check_rows(variant, 20 * batches + 1)


def check_rows(variant: Variant, M: int) -> None:
    """M rows give one set of bits, and the right one, with all of them in the emulator."""
    problem = Problem(M, variant.N, variant.dtype, variant.weight_dtype)
    check = check_variant(variant, problem, schedules=3, seed=M, all_rows=True)
    assert check.problems == ()
    assert check.distinct_results == 1


@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
def test_tail_adds_in_pairs(target: Target) -> None:
    """640 partial sums of one row each, in the 64 lanes of the second kernel: as good as PyTorch,
    and better than what is left of the lanes added one after another."""
    problem = Problem.parse("640x256:fp32")
    knobs: dict[str, int | str] = {"strategy": "separate", "sum_threads": 512, "slice_columns": 32}
    knobs |= {"rows_per_cta": 1, "threads_per_row": 64, "ctas_per_sm": 4}
    variant = plain_variant(problem, target, **knobs)
    source = render(variant)
    plain = source.replace("if constexpr (kRows <= kMostPaired)", "if constexpr (false)")
    assert plain != source
    paired, one_after_another, pytorch = dw_errors(variant, problem, 640, source, plain)
    assert paired <= 1.1 * pytorch
    assert one_after_another > 1.1 * paired


def test_one_thread_has_one_place(target: Target) -> None:
    """The places of all threads' accumulators cover the block sums, and meet nothing else."""
    for shape, knobs in (("43x1024:fp32", {}), ("43x1001:bf16:fp32", {}), ("43x77:fp32", SCALAR)):
        variant = plain_variant(shape, target, strategy="separate", **knobs)
        chunk = 4 if variant.elements % 4 == 0 else 1
        places = [
            ((chunks * variant.threads) + thread) * chunk + i
            for chunks in range(variant.accumulators // chunk)
            for thread in range(variant.threads)
            for i in range(chunk)
        ]
        assert sorted(places) == list(range(variant.block_sums_bytes // 4))
        assert variant.block_sums_offset >= variant.broadcast_offset + 8
        end = variant.block_sums_offset + variant.block_sums_bytes
        assert variant.tiles_offset >= end and variant.block_sums_offset % 16 == 0
