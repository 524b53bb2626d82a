"""RMSNorm of rows of several heads, each of which is rotated, and its backward, in the emulator:
pipelines, strategies, clusters and ways to a partner against float64."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from generator.emulate import check_variant, find_compiler
from generator.emulate.check import CPU, check_source, small_launch
from generator.kernels.render import render
from generator.operations import OPERATIONS
from generator.problem import Problem
from generator.target import Target
from tests.support.emulator import run_to_one_result, small, small_variant
from tests.support.rotated import BACKWARD, FORWARD, PIPELINES, fault_of, of_heads, of_name
from tests.support.samples import DETERMINISTIC, space_of

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("reduction", DETERMINISTIC)
def test_deterministic_reduction_gives_one_set_of_right_bits(
    reduction: str, pipeline: str, target: Target
) -> None:
    shape = f"{BACKWARD}:42x1024:bf16+joined128"
    variant = small_variant(shape, reduction, target, **PIPELINES[pipeline])
    check = check_variant(variant, Problem.parse(shape), schedules=20, seed=2026, all_rows=True)
    assert check.problems == ()
    assert (check.schedules, check.distinct_results) == (20, 1)
    assert check.errors.keys() == {"dx", "dw"}


@pytest.mark.parametrize(
    ("shape", "threads_per_row", "partners"),
    [
        *(("61x1024:bf16+joined128", threads, "own") for threads in (32, 64)),
        ("61x256:bf16+joined128", 8, "own"),
        ("61x1024:bf16+joined64", 32, "own"),
        ("45x1024:fp16:fp32+offset+joined512", 64, "own"),
        ("45x256:fp32:fp32+offset+joined64", 16, "own"),
        ("61x896:bf16+joined128", 64, "shuffled"),  # some threads have no columns
        ("61x1280:bf16+joined128", 160, "shuffled"),
        ("61x1024:bf16+joined128", 128, "shuffled"),
        ("45x1280:bf16+joined128", 64, "shuffled"),  # some threads have a vector less
        ("45x768:bf16+joined256", 32, "shuffled"),
        ("45x512:fp32+joined128", 128, "shuffled"),
        ("70x64:bf16+joined32", 8, "shuffled"),  # several rows in a warp
        ("45x1024:bf16+joined512", 128, "read again"),  # of two warps
        ("61x384:bf16+joined96", 32, "read again"),  # no power of two
        *(("61x1024:bf16+joined128+interleaved", threads, "own") for threads in (32, 128)),
        ("61x384:bf16+joined96+interleaved", 32, "own"),  # the numbers of each vector are others
        ("45x256:fp32+offset+joined64+interleaved", 16, "own"),
    ],
)
@of_name
def test_rows_of_heads(
    name: str, shape: str, threads_per_row: int, partners: str, target: Target
) -> None:
    problem = Problem.parse(shape, name)
    variant = of_heads(problem, target, threads_per_row)
    assert variant["threads_per_row"] == threads_per_row
    assert variant.own_partners == (partners == "own")
    assert check_variant(variant, problem, schedules=3, all_rows=True).problems == ()


@pytest.mark.parametrize("pipeline", PIPELINES)
@of_name
def test_a_thread_has_both_columns_of_every_pair(name: str, pipeline: str, target: Target) -> None:
    """However rows reach the threads, and where each of them has vectors of two heads."""
    knobs = {**PIPELINES[pipeline], "rows_per_cta": 4, "weight_in": "registers"}
    for shape, threads in (("61x2048:bf16+joined128", 128), ("37x1024:fp32+joined64", 64)):
        problem = Problem.parse(shape, name)
        variant = small(problem, target, **{**knobs, "threads_per_row": threads})
        assert variant.halves
        assert check_variant(variant, problem, schedules=3, all_rows=True).problems == ()


def test_halves_of_narrow_heads_would_meet_in_a_bank(target: Target) -> None:
    """Eight threads read 128 bytes at once: of a stage that holds a row, those of two heads."""
    problem = Problem.parse("61x1024:bf16+joined64", FORWARD)
    knobs = {"threads_per_row": 64, "rows_per_cta": 4, "weight_in": "registers"}
    for pipeline, others in PIPELINES.items():
        variant = small(problem, target, **{**others, **knobs})
        assert variant.halves == (pipeline in ("direct", "async"))
        assert check_variant(variant, problem, schedules=3, all_rows=True).problems == ()


@pytest.mark.parametrize("head", [128, 4096])
@of_name
def test_a_cluster_shares_rows_of_heads(name: str, head: int, target: Target) -> None:
    """Also where a CTA has a part of a head, and partners are another CTA's."""
    pairs = "+interleaved" * (head == 128)
    for cluster, of_pairs in ((2, ""), (4, ""), (2, pairs)):
        problem = Problem.parse(f"37x8192:bf16+joined{head}{of_pairs}", name)
        variant = small(problem, target, cluster=cluster, threads_per_row=256)
        assert check_variant(variant, problem, schedules=3, all_rows=True).problems == ()


@of_name
def test_shuffled_partners_are_those_that_are_read(name: str, target: Target) -> None:
    problem = Problem.parse("61x1024:bf16+joined128", name)
    variant = of_heads(problem, target, 128)
    source = render(variant)
    read_again = source.replace("kColumns % kHead == 0 &&", "kVectors < 0 &&")
    assert read_again != source
    assert "kPartnersInWarp" in source
    spec, launch = small_launch(variant, problem.M)
    assert check_source(read_again, spec, launch, problem, schedules=3).problems == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "groups"), [(1, 70), (1, 14), (5, 14)])
@of_name
def test_rows_share_numbers_of_either_dtype(
    name: str, rows: int, groups: int, dtype: torch.dtype, target: Target
) -> None:
    """The numbers repeat where they are fewer than rows, as those of a sequence in a batch."""
    problem = Problem.parse("70x512:bf16+joined128", name)
    given = OPERATIONS[name].make_inputs(problem, CPU)
    assert given.heads == 1
    generator = torch.Generator().manual_seed(rows)
    cos, sin = (torch.randn(groups, 64, generator=generator).to(dtype) for _ in range(2))
    inputs = replace(given, cos=cos, sin=sin, heads=rows)
    variant = of_heads(problem, target, 32)
    assert fault_of(variant, problem, inputs) == ""
    other = run_to_one_result(variant, replace(inputs, cos=cos * 1.5))
    found = run_to_one_result(variant, inputs)
    assert not any(torch.equal(found[out], other[out]) for out in found)


OWN, SHUFFLED = ("1024:bf16+joined128", 32), ("512:bf16+joined128", 64)
READ, ODD = ("384:bf16+joined96", 32), ("384:bf16+joined192", 32)
PAIRS, ODD_PAIRS = ("512:bf16+joined128+interleaved", 32), ("384:bf16+joined96+interleaved", 32)


@pytest.mark.parametrize(
    ("name", "old", "new", "found", "of"),
    [
        (FORWARD, "column % kHalf", "column % kHead", r"reads \d+ bytes at (cos|sin)\[", SHUFFLED),
        (FORWARD, "rows.column(j) % kHead < kHalf", "rows.column(j) < kHalf", r"y\[", SHUFFLED),
        (BACKWARD, "rows.column(j) % kHead < kHalf", "rows.column(j) < kHalf", r"dx\[", SHUFFLED),
        (BACKWARD, "kHeadVectors / 2)", "1)", r"dx\[.* are off", SHUFFLED),
        (FORWARD, "(j % 2 == 0) ? -", "(j % 2 == 1) ? -", r"y\[.* are off", OWN),
        (BACKWARD, "return j ^ 1;", "return j;", r"dx\[.* are off", OWN),
        (FORWARD, "y_to + Rows::distance(j)", "y_to + j * 256", r"y\[", OWN),
        (BACKWARD, "kBlockVectors * kBlockLanes)", "kBlockVectors * 4)", r"dx\[", OWN),
        (BACKWARD, "kElements % kHalf == 0 ? 1", "kElements > 0 ? 1", r"dx\[.* are off", ODD),
        (FORWARD, "column % kHead < kHalf ? column + kHalf", "false ? 0", r"reads|y\[", READ),
        (FORWARD, "column % kHead / 2", "column / 2", r"reads \d+ bytes at (cos|sin)\[", PAIRS),
        (BACKWARD, "kElements % kHead == 0 ? 1", "kElements > 0 ? 1", r"dx\[", ODD_PAIRS),
    ],
)
def test_planted_wrong_kernel_is_caught(
    name: str, old: str, new: str, found: str, of: tuple[str, int], target: Target
) -> None:
    columns, threads_per_row = of
    problem = Problem.parse(f"45x{columns}", name)
    variant = of_heads(problem, target, threads_per_row)
    source = render(variant)
    assert old in source
    spec, launch = small_launch(variant, problem.M)
    check = check_source(source.replace(old, new), spec, launch, problem, schedules=3)
    assert any(re.search(found, said) for said in check.problems), check.problems


@of_name
def test_numbers_of_each_vector_take_registers(name: str, target: Target) -> None:
    """32 threads have vectors of 256 columns: with heads of 96, each has other numbers."""
    one, three = (
        of_heads(Problem.parse(f"45x768:bf16+joined{head}", name), target, 32) for head in (128, 96)
    )
    assert (one.vectors, three.vectors) == (3, 3)
    assert three.register_estimate - one.register_estimate == 2 * 2 * 8
    halves = of_heads(Problem.parse("45x1024:bf16+joined128", name), target, 32)
    two = replace(halves, config={**halves.config, "rows_in_flight": 2})
    rows = 4 * 8 * 2 * len(halves.signature.early) // 4  # of four vectors, in words
    assert halves.halves and two.register_estimate - halves.register_estimate == rows + 2 * 8


@pytest.mark.parametrize("threads_per_row", [32, 128])
def test_it_is_what_olmo_computes(threads_per_row: int, target: Target) -> None:
    """A norm of the whole row, then rotate_half of each head, as model code has it."""
    problem = Problem.parse("64x512:fp32+joined128", FORWARD)
    inputs = OPERATIONS[FORWARD].make_inputs(problem, CPU)
    variant = of_heads(problem, target, threads_per_row)
    found = run_to_one_result(variant, inputs)["y"].double()
    n = torch.nn.functional.rms_norm(inputs.x.double(), (512,), inputs.weight.double(), inputs.eps)
    heads = n.view(64, 4, 128)
    cos, sin = (torch.cat((one, one), -1).double()[:, None] for one in (inputs.cos, inputs.sin))
    first, second = heads.chunk(2, -1)
    wanted = heads * cos + torch.cat((-second, first), -1) * sin
    torch.testing.assert_close(found, wanted.view(64, 512), rtol=1e-5, atol=1e-5)


@of_name
def test_half_a_head_that_is_no_whole_number_of_vectors_is_refused(
    name: str, target: Target
) -> None:
    problem = Problem.parse("4096x144:bf16+joined36", name)
    known = of_heads(replace(problem, rotation="joined48"), target, 8).config
    space = space_of(name)
    rejection = space.reject(space.normalize(known, problem, target), problem, target)
    assert rejection is not None and rejection.rule == "pairs"
    assert "half of 36 rotated columns is no whole number of vectors of 8" in rejection.sentence
