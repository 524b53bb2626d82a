"""RMSNorm of heads with the rotary embedding behind it, and its backward, in the emulator: every
pipeline, strategy and way to a partner against float64, under many schedules."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from generator.emulate import check_variant, find_compiler
from generator.emulate.check import CPU, check_source, small_launch
from generator.emulate.run import CallOptions, Runs, Schedule, run_schedules
from generator.kernels.render import render
from generator.kernels.variant import Variant
from generator.operations import OPERATIONS
from generator.problem import Problem
from generator.target import Target
from tests.support.emulator import run_to_one_result, small, small_variant
from tests.support.rotated import BACKWARD, FORWARD, PIPELINES, fault_of, of_heads, of_name
from tests.support.samples import DETERMINISTIC, space_of

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")


@pytest.mark.sampled(12)
@pytest.mark.parametrize("rotation", ["+rotary256", "+interleaved"])
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("reduction", DETERMINISTIC)
def test_deterministic_reduction_gives_one_set_of_right_bits(
    reduction: str, pipeline: str, rotation: str, target: Target
) -> None:
    shape = f"{BACKWARD}:42x1024:bf16{rotation}"
    variant = small_variant(shape, reduction, target, **PIPELINES[pipeline])
    check = check_variant(variant, Problem.parse(shape), schedules=20, seed=2026, all_rows=True)
    assert check.problems == ()
    assert (check.schedules, check.distinct_results) == (20, 1)
    assert check.errors.keys() == {"dx", "dw"}


@pytest.mark.parametrize("rotation", ["+rotary512", "+rotary512+interleaved"])
@pytest.mark.parametrize("pipeline", ["direct", "bulk", "async"])
def test_every_schedule_gives_one_set_of_right_bits(
    pipeline: str, rotation: str, target: Target
) -> None:
    problem = Problem.parse(f"42x1024:bf16{rotation}", FORWARD)
    knobs = {**PIPELINES[pipeline], "grid": "full", "weight_in": "registers"}
    variant = small(problem, target, **knobs)
    check = check_variant(variant, problem, schedules=5, seed=2026, all_rows=True)
    assert check.problems == ()
    assert (check.distinct_results, check.errors.keys()) == (1, {"y"})


@pytest.mark.parametrize(
    ("shape", "threads_per_row"),
    [
        *(("203x128:bf16", threads) for threads in (8, 16, 32)),
        *(("192x128:bf16", threads) for threads in (8, 16, 32)),  # batches of one group
        ("61x64:fp16:fp32", 8),
        ("97x96:bf16", 16),
        ("97x96:bf16", 8),  # an even number of vectors, and threads that have none of the last
        *(("97x128:fp32+offset", threads) for threads in (8, 16, 32)),
        *(("77x256:bf16", threads) for threads in (8, 16, 32)),
        ("45x96:fp32", 8),
        *(("77x256:bf16+rotary64", threads) for threads in (8, 16, 32)),
        *(("77x256:bf16+rotary128", threads) for threads in (8, 16)),
        *(("61x128:fp16:fp32+rotary48", threads) for threads in (8, 16)),
        ("61x128:fp32+offset+rotary96", 8),
        ("45x96:fp32+rotary32", 8),
        ("45x36:fp32+rotary32", 8),
        ("45x65:bf16+rotary64", 32),
        *(("77x256:bf16+rotary64+interleaved", threads) for threads in (8, 16, 32)),
        ("61x128:fp16:fp32+rotary48+interleaved", 8),
        ("61x96:bf16+interleaved", 8),
        ("61x36:fp16+interleaved", 8),
        ("61x34:bf16+rotary14+interleaved", 8),
        ("45x128:fp32+offset+rotary96+interleaved", 16),
    ],
)
@of_name
def test_heads(name: str, shape: str, threads_per_row: int, target: Target) -> None:
    """Partners are a thread's own, a shuffle away, or read again."""
    problem = Problem.parse(shape, name)
    variant = of_heads(problem, target, threads_per_row)
    assert check_variant(variant, problem, schedules=3, all_rows=True).problems == ()


@pytest.mark.parametrize("rows_in_flight", [1, 2])
@pytest.mark.parametrize("pipeline", ["direct", "bulk", "async"])
@of_name
def test_a_last_batch_that_is_not_full(
    name: str, pipeline: str, rows_in_flight: int, target: Target
) -> None:
    problem = Problem.parse("203x128:bf16", name)
    knobs = {**PIPELINES[pipeline], "rows_in_flight": rows_in_flight, "weight_in": "registers"}
    knobs["threads_per_row"] = 32 if pipeline == "bulk" else 8
    variant = small(problem, target, **knobs, rows_per_cta=8)
    assert check_variant(variant, problem, schedules=3, all_rows=True).problems == ()


@of_name
def test_ways_to_a_partner_give_the_same_bits(name: str, target: Target) -> None:
    """Their row sums are added alike where a thread has one vector, or two in the other order."""
    problem = Problem.parse("70x128:bf16", name)
    inputs = OPERATIONS[name].make_inputs(problem, CPU)
    shuffled = of_heads(problem, target, 16)
    source = render(shuffled)
    read_again = source.replace("kNoneIdle && kVectors == 1", "kVectors < 0")
    assert read_again != source
    spec, launch = small_launch(shuffled, problem.M)
    check = check_source(read_again, spec, launch, problem, schedules=3)
    assert check.problems == ()
    assert run_to_one_result(shuffled, inputs).keys() == check.errors.keys()


@pytest.mark.parametrize(
    "rotation", ["", "+rotary64", "+rotary6400", "+interleaved", "+rotary6400+interleaved"]
)
@of_name
def test_a_cluster_reads_partners_of_other_ctas_again(
    name: str, rotation: str, target: Target
) -> None:
    problem = Problem.parse(f"37x8192:bf16{rotation}", name)
    variant = small(problem, target, cluster=2, threads_per_row=256)
    assert check_variant(variant, problem, schedules=3, all_rows=True).problems == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "groups"), [(1, 70), (5, 14), (7, 3), (32, 1), (40, 2), (3, 5)])
@of_name
def test_groups_of_any_size_share_numbers_of_either_dtype(
    name: str, heads: int, groups: int, dtype: torch.dtype, target: Target
) -> None:
    """The numbers repeat where they are fewer than groups, as those of a sequence in a batch."""
    rotation = {0: "+rotary32", 2: "+interleaved"}.get(heads % 5, "")
    problem = Problem.parse(f"70x64:bf16{rotation}", name)
    given = OPERATIONS[name].make_inputs(problem, CPU)
    generator = torch.Generator().manual_seed(heads)
    half = problem.rotated // 2
    cos, sin = (torch.randn(groups, half, generator=generator).to(dtype) for _ in range(2))
    inputs = replace(given, cos=cos, sin=sin, heads=heads)
    variant = of_heads(problem, target, 8)
    assert fault_of(variant, problem, inputs) == ""
    wrong = replace(inputs, heads=heads + 1, cos=cos * 1.5)
    assert fault_of(variant, problem, wrong) == ""
    found, other = run_to_one_result(variant, inputs), run_to_one_result(variant, wrong)
    assert not any(torch.equal(found[out], other[out]) for out in found)


@pytest.mark.parametrize(
    "shape", ["70x128:fp16", "70x128:fp16+interleaved", "70x34:fp16+rotary14+interleaved"]
)
@of_name
def test_numbers_of_16_bits_are_those_of_32(name: str, shape: str, target: Target) -> None:
    problem = Problem.parse(shape, name)
    given = OPERATIONS[name].make_inputs(problem, CPU)
    narrow = replace(given, cos=given.cos.half(), sin=given.sin.half())
    wide = replace(given, cos=narrow.cos.float(), sin=narrow.sin.float())
    variant = of_heads(problem, target, 8)
    found, same = run_to_one_result(variant, narrow), run_to_one_result(variant, wide)
    assert all(torch.equal(found[out], same[out]) for out in found)


FORCED = ("if (args.rows == 0 ||", "if (true ||")
"""A change by which batches of one group go through the loop of all others."""


def runs_of(source: str, variant: Variant, inputs: Any, inner: int) -> Runs:
    spec, launch = small_launch(variant, len(inputs.x))
    schedules = [Schedule(seed, launch.grid) for seed in range(2)]
    options = CallOptions(inner=inner)
    return run_schedules(source, spec, launch, inputs, schedules, call_options=options)


def in_groups(name: str, heads: int, dtype: torch.dtype = torch.float32) -> tuple[Problem, Any]:
    """Return rows of groups of `heads`, with numbers of such a dtype."""
    problem = Problem.parse("96x128:bf16", name)
    given = OPERATIONS[name].make_inputs(problem, CPU)
    cos, sin = (torch.randn(-(-96 // heads), 64).to(dtype) for _ in range(2))
    return problem, replace(given, cos=cos, sin=sin, heads=heads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pipeline", ["direct", "async", "bulk"])
@pytest.mark.parametrize(
    ("heads", "inner"), [(8, 0), (32, 0), (32, 32), (48, 8), (8, 48), (12, 0), (24, 12), (12, 24)]
)
@of_name
def test_batches_of_one_group_have_a_loop_of_their_own(
    name: str, heads: int, inner: int, pipeline: str, dtype: torch.dtype, target: Target
) -> None:
    """It gives the bits of the loop of all others, also of rows with gaps between them. A batch
    across two groups, or across a gap, does not go there."""
    problem, inputs = in_groups(name, heads, dtype)
    threads = 32 if pipeline == "bulk" else 8
    knobs = {
        **PIPELINES[pipeline],
        "rows_in_flight": 2,
        "threads_per_row": threads,
        "rows_per_cta": 8,
    }
    knobs["weight_in"] = "registers"
    variant = small(problem, target, **knobs)
    source = render(variant)
    found, forced = (
        runs_of(text, variant, inputs, inner) for text in (source, source.replace(*FORCED))
    )
    assert found.faults == forced.faults == []
    assert found.distinct_results == 1
    assert all(torch.equal(found.results[out][0], forced.results[out][0]) for out in found.results)
    without = runs_of(re.sub(r"take_batches\(true, .*?\);", ";", source), variant, inputs, inner)
    served = bool(without.faults) or any(
        not torch.equal(found.results[out][0], without.results[out][0]) for out in found.results
    )
    assert served is (math.gcd(heads, inner) % variant.batch_rows == 0)


@pytest.mark.parametrize(
    ("pipeline", "old", "new", "heads"),
    [
        ("direct", "(u * kRowsAbreast + row_abreast()) * stride", "row_abreast() * stride", 32),
        ("direct", "(batch < last ? batch : last)", "(batch < last ? batch + 9 : last)", 8),
        ("async", "(batch < last ? batch : last)", "(batch < last ? batch + 9 : last)", 8),
        ("async", "(batch < last ? batch : last)", "batch", 8),
        ("async", "rows.together ? batch < rows.batches : row", "rows.together || row", 32),
        ("async", "args.together % kBatchRows != 0", "false", 12),
        ("direct", "rows.together ? 0 : u", "0", 12),
        ("direct", "take_batches(true, true)", "take_batches(true, false)", 32),
    ],
)
def test_planted_wrong_loop_of_one_group_is_caught(
    pipeline: str, old: str, new: str, heads: int, target: Target
) -> None:
    problem, inputs = in_groups(BACKWARD, heads)
    knobs = {**PIPELINES[pipeline], "rows_in_flight": 2, "threads_per_row": 8, "rows_per_cta": 8}
    variant = small(problem, target, **knobs)
    source = render(variant)
    assert old in source
    right = runs_of(source.replace(*FORCED), variant, inputs, 0)
    wrong = runs_of(source.replace(old, new), variant, inputs, 0)
    assert wrong.faults or not torch.equal(wrong.results["dx"][0], right.results["dx"][0])


WHOLE, PART, QWEN = "203x128:bf16", "77x128:fp16+rotary48", "77x256:bf16+rotary64"
NEXT = "77x128:bf16+rotary64+interleaved"
PLANTED = [
    *(
        (*planted, WHOLE, 16)
        for planted in (
            (FORWARD, "(rows.column(j) < kHalf) ? -rotated", "false ? -rotated", r"y\[.* are off"),
            (FORWARD, "weight_of(partner_w, i", "weight_of(w, i", r"y\[.* are off"),
            (FORWARD, "kThreadsPerRow / 2", "1", r"y\[.* are off"),
            (FORWARD, "(group - quotient", "(0 * group - quotient", r"y\[.* are off"),
            (BACKWARD, "(rows.column(j) < kHalf) ?", "true ?", r"dx\[.* are off"),
            (BACKWARD, "__fmul_rn(correction, xe)", "0.0f", r"dx\[.* are off"),
            (
                BACKWARD,
                "__fmaf_rn(xe, scaled, partial",
                "__fmaf_rn(scaled, scaled, partial",
                r"dw\[",
            ),
        )
    ),
    (FORWARD, " || column >= kRotary", "", r"reads 16 bytes at (cos|sin)\[", QWEN, 32),
    (FORWARD, "is_rotated(j, rows.column(j)) ? __f", "true ? __f", r"y\[", PART, 16),
    (
        FORWARD,
        "column < kHalf ? column + kHalf",
        "column < kHalf ? column + kRotary",
        r"y\[",
        PART,
        8,
    ),
    (BACKWARD, "&& column < kRotary)", "&& column < kHalf)", r"dx\[.* are off", PART, 8),
    (BACKWARD, "kHalfVectors)", "1)", r"dx\[.* are off", QWEN, 32),
    (FORWARD, "words, i ^ 1)", "words, i)", r"y\[.* are off", NEXT, 8),
    (FORWARD, "start + column / 2", "start + column", r"reads \d+ bytes at (cos|sin)\[", NEXT, 8),
    (BACKWARD, "(i % 2 == 0) ?", "(i % 2 == 1) ?", r"dx\[.* are off", NEXT, 8),
    (BACKWARD, "], i / 2, rows", "], i % (kElements / 2), rows", r"dx\[.* are off", NEXT, 8),
    (BACKWARD, "? j + kHalfSteps", "? j", r"dx\[.* are off", "77x256:bf16+rotary128", 8),
    (BACKWARD, "args.rows % kBatchRows != 0 ||", "", r"(reads|writes) ", "77x128:bf16", 8),
]


@pytest.mark.parametrize(("name", "old", "new", "found", "shape", "threads"), PLANTED)
def test_planted_wrong_kernel_is_caught(
    name: str, old: str, new: str, found: str, shape: str, threads: int, target: Target
) -> None:
    problem = Problem.parse(shape, name)
    variant = of_heads(problem, target, threads)
    source = render(variant)
    assert old in source
    spec, launch = small_launch(variant, problem.M)
    check = check_source(source.replace(old, new), spec, launch, problem, schedules=3)
    assert any(re.search(found, said) for said in check.problems), check.problems


@pytest.mark.parametrize("rotation", ["", "+rotary32"])
def test_it_is_what_pytorch_computes(rotation: str, target: Target) -> None:
    """rotate_half as model code has it stands beside the formula of the operation."""
    problem = Problem.parse(f"64x128:fp32{rotation}", FORWARD)
    inputs = OPERATIONS[FORWARD].make_inputs(problem, CPU)
    found = run_to_one_result(of_heads(problem, target, 16), inputs)["y"].double()
    n = torch.nn.functional.rms_norm(inputs.x.double(), (128,), inputs.weight.double(), inputs.eps)
    cos, sin = (
        torch.cat((one, one), -1).double().repeat_interleave(32, 0)
        for one in (inputs.cos, inputs.sin)
    )
    n, rest = n[:, : cos.shape[1]], n[:, cos.shape[1] :]
    first, second = n.chunk(2, -1)
    wanted = torch.cat((n * cos + torch.cat((-second, first), -1) * sin, rest), -1)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@of_name
def test_half_a_row_that_is_no_whole_number_of_vectors_is_refused(
    name: str, target: Target
) -> None:
    problem = Problem.parse("4096x72:bf16", name)
    space = space_of(name)
    known = of_heads(replace(problem, N=64), target, 8).config
    rejection = space.reject(space.normalize(known, problem, target), problem, target)
    assert rejection is not None and rejection.rule == "pairs"
    assert "half of 72 rotated columns is no whole number of vectors of 8" in rejection.sentence
    partial = Problem.parse("4096x64:bf16+rotary24", name)
    rejection = space.reject(space.normalize(known, partial, target), partial, target)
    assert rejection is not None and rejection.rule == "pairs"
    assert "half of 24 rotated columns is no whole number of vectors of 8" in rejection.sentence
    for rotation in ("rotary32", "rotary24+interleaved"):
        served = replace(partial, rotation=rotation)
        assert space.reject(space.normalize(known, served, target), served, target) is None
    odd = Problem.parse("4096x64:bf16+rotary20+interleaved", name)
    rejection = space.reject(space.normalize(known, odd, target), odd, target)
    assert rejection is not None and rejection.rule == "neighbours"
    assert "20 rotated columns are no whole number of vectors of 8" in rejection.sentence
