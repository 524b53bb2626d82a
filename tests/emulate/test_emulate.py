"""Kernels on the CPU: right values, one set of bits under every schedule, faults named."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
from dataclasses import replace

import pytest
import torch

from generator.emulate import Schedule, check_variant, find_compiler, run_schedules
from generator.emulate.build import build
from generator.emulate.check import (
    CPU,
    PARTICIPANTS,
    Check,
    check_source,
    reduced_problem,
    small_launch,
)
from generator.emulate.run import CallOptions, Layout
from generator.kernels.render import render
from generator.kernels.variant import Variant, make_variant
from generator.operations.rmsnorm_backward import make_cancelling, make_inputs
from generator.package.fallback_kernels import fallback_variants, serves
from generator.paths import REPOSITORY
from generator.problem import Problem
from generator.target import Target, find_target
from tests.support.emulator import WITHOUT_DW, WITHOUT_DX
from tests.support.patience import patience
from tests.support.samples import (
    DETERMINISTIC,
    REDUCTION,
    drawn_variant,
    plain_variant,
    sample_variant,
)

SEED = int(os.environ.get("NORMFORGE_EMULATE_SEED", "2026"))
"""The seed of the sampled variants; every test id shows it."""
ROOT = REPOSITORY

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
pytestmark = needs_compiler


# ---- One set of bits -----------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("pipeline", ["direct", "bulk"])
@pytest.mark.parametrize("reduction", DETERMINISTIC)
def test_deterministic_reduction_gives_one_set_of_bits(
    reduction: str, pipeline: str, target: Target
) -> None:
    knobs = {"pipeline": pipeline, **REDUCTION[reduction]}
    if pipeline == "bulk":
        knobs["stages"] = 2
    if reduction == "separate":
        knobs["sum_threads"] = 128
    variant = plain_variant("43x1024:bf16", target, **knobs)
    problem = Problem.parse("43x1024:bf16")
    _, launch = small_launch(variant, problem.M)
    assert launch.grid == 5
    check = check_variant(
        variant, problem, schedules=200, residencies=(1, 3, launch.grid), seed=SEED, all_rows=True
    )
    assert check.problems == ()
    assert (check.schedules, check.distinct_results) == (200, 1)


@pytest.mark.parametrize("reduction", ["atomic", "bulk_free"])
def test_free_running_reduction_is_told_apart(reduction: str, target: Target) -> None:
    variant = plain_variant("43x1024:bf16", target, **REDUCTION[reduction])
    problem = Problem.parse("43x1024:bf16")
    check = check_variant(variant, problem, schedules=100, seed=SEED, all_rows=True)
    assert check.problems == ()
    assert check.distinct_results > 1
    # A variant of this kind that claimed to be deterministic would be caught.
    spec, launch = small_launch(variant, problem.M)
    claim = replace(spec, determinism="gpu_to_gpu")
    caught = check_source(render(variant), claim, launch, problem, schedules=100, seed=SEED)
    assert any(
        "different results" in problem or "race" in problem or "in no order" in problem
        for problem in caught.problems
    )


def test_same_seed_gives_the_same_schedule(target: Target) -> None:
    variant = plain_variant("43x1024:bf16", target, **REDUCTION["atomic"])
    problem = Problem.parse("43x1024:bf16")
    inputs = make_cancelling(problem, make_inputs(problem, CPU))
    spec, launch = small_launch(variant, problem.M)

    def dw_of(seed: int) -> torch.Tensor:
        schedule = Schedule(seed, launch.grid)
        runs = run_schedules(render(variant), spec, launch, inputs, [schedule])
        assert not any(runs.faults)
        return runs.results["dw"][0]

    first, again, *others = map(dw_of, (7, 7, *range(20)))
    assert torch.equal(first, again)
    assert any(not torch.equal(first, other) for other in others)


# ---- Words that tell by themselves whether they have arrived -------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("shape", "teams"),
    [
        ("43x1024:bf16", 1),
        ("43x1024:bf16", 2),
        ("43x1001:bf16", 1),
        ("43x1001:bf16", 2),
        ("43x1022:fp32", 1),
        ("97x16:fp32", 8),
        ("97x1:fp16:fp32", 8),
        ("1x1:bf16", 8),
    ],
)
def test_mailbox_has_the_bits_of_column_slices(shape: str, teams: int, target: Target) -> None:
    """Both add the same in the same order, whatever travels: zeros and padding, NaN and
    infinity."""
    problem = Problem.parse(shape)
    tuned = replace(problem, M=1 << 16)
    sampled = sample_variant(
        tuned, target, SEED, **REDUCTION["mailbox"], pipeline="direct", rows_per_cta=teams
    )
    plain = make_inputs(problem, CPU)
    zeros, wild = plain.dy.clone(), plain.dy.clone()
    zeros[:, ::3] = 0.0
    zeros[:, 1::6] = -0.0
    wild[problem.M // 3, -1] = torch.inf
    wild[problem.M - 1, -1] = -torch.inf
    wild[problem.M // 2, 0] = torch.nan
    cases = {
        "plain": plain,
        "cancelling": make_cancelling(problem, plain),
        "zeros": replace(plain, dy=zeros),
        "nothing but zeros": replace(plain, dy=torch.zeros_like(plain.dy)),
        "wild": replace(plain, dy=wild),
    }
    for name, inputs in cases.items():
        found = {}
        for reduction in ("mailbox", "column_slices"):
            variant = make_variant({**sampled.config, **REDUCTION[reduction]}, tuned)
            spec, launch = small_launch(variant, problem.M)
            schedules = [Schedule(SEED + seed, launch.grid) for seed in range(20)]
            runs = run_schedules(render(variant), spec, launch, inputs, schedules)
            assert runs.faults == [], (reduction, name)
            assert (len(runs.outcomes), runs.distinct_results) == (20, 1)
            # Which NaN an addition gives depends here on how the compiler orders its operands.
            dw = runs.results["dw"][0]
            dw = torch.where(dw.isnan(), torch.nan, dw)
            found[reduction] = dw.view(torch.int32 if dw.dtype == torch.float32 else torch.int16)
            assert dw.isnan().any() == (name == "wild")
            if "zeros" in name:  # a sum that starts at +0 does not become -0
                assert (found[reduction][::3] == 0).all()
        assert torch.equal(found["mailbox"], found["column_slices"]), name


SINGLE = {"threads_per_row": 128, "rows_per_cta": 1, "ctas_per_sm": 2}
TEAMS = {"threads_per_row": 64, "rows_per_cta": 4}
PAIRS = {"threads_per_row": 128, "rows_per_cta": 2, "cluster": 2}
CLUSTERS = {"threads_per_row": 256, "rows_per_cta": 1, "cluster": 4, "weight_in": "smem"}
SHORT_TEAMS = {"threads_per_row": 8, "rows_per_cta": 8}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("shape", "knobs", "pipeline"),
    [
        *(("43x1024:bf16", SINGLE, pipeline) for pipeline in ("direct", "async", "bulk")),
        *(("43x1024:bf16", TEAMS, pipeline) for pipeline in ("direct", "async", "bulk")),
        *(("43x4096:bf16", PAIRS, pipeline) for pipeline in ("direct", "bulk")),
        ("13x8192:bf16", CLUSTERS, "async"),
        *(("203x64:bf16", SHORT_TEAMS, pipeline) for pipeline in ("direct", "async")),
        *(("1x1024:bf16", TEAMS, pipeline) for pipeline in ("async", "bulk")),
    ],
)
def test_early_arrival_changes_no_bits(
    shape: str, knobs: dict[str, int | str], pipeline: str, target: Target
) -> None:
    """Bits stay whether or not all CTAs are there at once, and whatever the call asks for."""
    problem = Problem.parse(shape)
    inputs = make_cancelling(problem, make_inputs(problem, CPU))
    knobs = {**REDUCTION["mailbox"], **knobs, "pipeline": pipeline}
    if pipeline != "direct":
        knobs["stages"] = 3
    found = []
    for arrival in ("late", "early"):
        variant = plain_variant(replace(problem, M=1 << 16), target, **knobs, arrival=arrival)
        source = render(variant)
        spec, launch = small_launch(variant, problem.M)
        assert ("strategy.announce(participant)" in source) == (arrival == "early")
        assert launch.participants == min(5, problem.M)
        resident = [spec.cluster * clusters for clusters in range(1, launch.participants + 1)]
        schedules = [
            Schedule(SEED + seed, resident[seed % len(resident)])
            for seed in range(40 if arrival == "early" else 1)
        ]
        for call_options in (CallOptions(), WITHOUT_DX, WITHOUT_DW):
            some = schedules[-2:] if call_options.without else schedules
            runs = run_schedules(source, spec, launch, inputs, some, call_options=call_options)
            assert runs.faults == [], call_options
            assert (len(runs.outcomes), runs.distinct_results) == (len(some), 1)
            found += runs.results.get("dw", [])
    assert all(torch.equal(dw, found[0]) for dw in found)


# ---- Sampled variants ----------------------------------------------------------------------------

SHAPES = (
    "70x1:fp16",
    "64x6:bf16",
    "55x33:bf16:fp32",
    "61x77:fp32",
    "50x129:fp16",
    "97x333:bf16",
    "300x256:bf16",
    "300x512:fp16:fp32",
    "97x1000:bf16",
    "200x1024:bf16:fp32",
    "99x2050:fp32",
    "201x3072:fp16",
    "200x4096:fp32",
    "99x4104:bf16",
    "133x8192:bf16",
    "111x8192:fp32",
    "120x16384:bf16:fp32",
    "99x2050:fp16+residual_fp32",
    "97x512:bf16+offset+residual",
)


def sampled(index: int) -> tuple[Problem, Variant, Layout]:
    """Case `index` of SEED: reduction kinds, shapes and pipelines in turn, the rest at random."""
    rng = random.Random(f"{SEED} {index}")
    reduction = list(REDUCTION.values())[index % len(REDUCTION)]
    problem = Problem.parse(SHAPES[index % len(SHAPES)])
    gpu = find_target(rng.choice(("h200", "gb200", "a100")))
    knobs: dict[str, int | str] = {
        "pipeline": ("bulk", "direct", "async")[index % 3],
        "cluster": rng.choice((1, 2, 4, 8)),
        "reload": rng.choice(("smem", "none")),
        "rows_in_flight": rng.choice((1, 2)),
    }
    tries = [
        (where, {**reduction, **dict(list(knobs.items())[:count])})
        for count in range(len(knobs), -1, -1)
        for where in (gpu, find_target("h200"))
    ]
    drawn = (drawn_variant(problem, at, rng.randrange(1 << 32), **fixed) for at, fixed in tries)
    variant = next(filter(None, drawn))
    layout = Layout()
    # Strides and bases are multiples of the vector, and no more.
    if rng.random() < 0.5 and not variant.shifted:
        unit = max(1, variant["vector_bytes"] // problem.itemsize)
        unit = unit * 8 if variant["pipeline"] == "bulk" and problem.itemsize < 4 else unit * 4
        layout = Layout((unit, 3 * unit, 2 * unit), max(16, variant["vector_bytes"]))
    return problem, variant, layout


@pytest.mark.sampled(7)
@pytest.mark.parametrize("index", range(38), ids=lambda index: f"seed{SEED}-{index}")
def test_sampled_variant_is_right_under_every_schedule(index: int) -> None:
    problem, variant, layout = sampled(index)
    check = check_variant(variant, problem, schedules=6, seed=index, layout=layout)
    assert check.problems == (), (dict(variant.config), layout)
    assert check.schedules == 6
    if variant.determinism != "none":
        assert check.distinct_results == 1


@pytest.mark.slow
def test_the_samples_cover_the_space() -> None:
    variants = [sampled(index)[1] for index in range(38)]
    assert {v["strategy"] for v in variants} == {v["strategy"] for v in REDUCTION.values()}
    assert {v.dtype for v in variants} == {"bf16", "fp16", "fp32"}
    assert {v["pipeline"] for v in variants} == {"bulk", "direct", "async", "producer"}
    assert {v["reload"] for v in variants} == {"none", "smem"}
    assert len({v["cluster"] for v in variants}) > 2
    assert any(v.weight_dtype != v.dtype for v in variants)


def check_rows(variant: Variant, source: str, problem: Problem, schedules: int) -> Check:
    """Check rows at addresses and strides that are multiples of the variant's vector and of nothing
    wider."""
    spec, launch = small_launch(variant, problem.M)
    unit = variant["vector_bytes"] // problem.itemsize
    layout = Layout((unit, 3 * unit, 2 * unit), variant["vector_bytes"])
    return check_source(
        source, spec, launch, problem, schedules=schedules, seed=SEED, layout=layout
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "shape",
    [
        "21x1:bf16:fp32",
        "21x553:bf16",
        "21x1001:bf16:fp32",
        "21x1024:bf16:fp32",
        "21x1922:fp16:fp32",
        "21x3890:bf16",
        "21x4104:bf16:fp32",
        "21x7935:bf16",
        "201x414:bf16",
        "21x15874:bf16",
        "21x999:fp32",
        # The next ones are at the ends of brackets.
        "21x513:bf16",
        "21x3073:fp32",
        "21x1032:fp16",
        "21x5120:bf16",
    ],
)
def test_fallback_variant_serves_rows_of_its_bracket(shape: str, target: Target) -> None:
    """The first choice for every vector that divides the row, at addresses and strides that are
    multiples of that vector and of nothing wider."""
    problem = Problem.parse(shape)
    found = [
        variant
        for variant in fallback_variants(target, [(problem.dtype, problem.weight_dtype)])
        if serves(variant, problem)
    ]
    chosen = {variant["vector_bytes"]: variant for variant in reversed(found)}
    row_bytes = problem.N * problem.itemsize
    assert (16 in chosen) == (row_bytes % 16 == 0)
    assert (4 in chosen) == (row_bytes % 4 == 0)
    assert (2 in chosen) == (problem.dtype != "fp32")
    for variant in chosen.values():
        check = check_rows(variant, render(variant), problem, schedules=4)
        assert check.problems == (), variant.id
        assert check.distinct_results == 1


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "shape",
    [
        "layernorm_backward:21x1:bf16:fp32",
        "layernorm_backward:21x1001:bf16",  # the second sums begin at an odd place
        "layernorm_backward:21x1001:fp32",
        "layernorm_backward:21x1000:bf16",
        "layernorm_backward:40x770:fp16:fp32",
        "layernorm_backward:9x6000:bf16",
        "layernorm_backward:21x3072:fp32",
        "layernorm_forward:21x1:fp16",
        "layernorm_forward:21x1001:bf16:fp32",
        "layernorm_forward:21x1000:bf16",
        "layernorm_forward:9x6000:fp32",
        "layernorm_forward:9x15000:bf16",
    ],
)
def test_fallback_variants_of_layernorm_serve_rows_of_their_brackets(
    shape: str, target: Target
) -> None:
    problem = Problem.parse(shape)
    pairs = [(problem.dtype, problem.weight_dtype)]
    found = [v for v in fallback_variants(target, pairs, problem.operation) if serves(v, problem)]
    chosen = {variant["vector_bytes"]: variant for variant in reversed(found)}
    assert chosen
    for variant in chosen.values():
        check = check_rows(variant, render(variant), problem, schedules=3)
        assert check.problems == (), variant.id
        assert check.distinct_results == 1


LONG_ROWS = (
    "9x20480:bf16",
    "3x16392:bf16:fp32",
    "3x24580:fp32",
    "3x40008:bf16",
    "2x65536:fp16:fp32",
    "1x16392:bf16",
    "70x16392:bf16",
)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("shape", LONG_ROWS)
def test_fallback_variants_share_long_rows_in_clusters(shape: str, target: Target) -> None:
    problem = Problem.parse(shape)
    variants = fallback_variants(target, [(problem.dtype, problem.weight_dtype)])
    found = {v.in_blocks: v for v in reversed(variants) if serves(v, problem)}
    assert found
    for variant in found.values():
        assert variant["cluster"] > 1
        check = check_rows(variant, render(variant), problem, schedules=2)
        assert check.problems == ()
        assert check.distinct_results == 1


@pytest.mark.parametrize(
    ("right", "wrong", "reported"),
    [
        ("left < part ? left : part", "part", "reads scratch.*, which nobody has written"),
        ("end < args.columns ? end : args.columns}", "end}", "out of bounds: reads .* at x"),
        ("end < args.columns ? end : args.columns}", "args.columns}", "dx|dw"),
        ("columns + kStep - 1) / kStep", "columns) / kStep", "dx|dw"),
        ("LEAST_COLUMNS 0", "LEAST_COLUMNS 16385", "out of bounds: reads .* at x"),
    ],
)
def test_wrong_parts_of_long_rows_are_found_out(
    right: str, wrong: str, reported: str, target: Target
) -> None:
    problem = Problem.parse("9x16392:bf16")
    variants = fallback_variants(target, [("bf16", "bf16")])
    variant = next(variant for variant in variants if serves(variant, problem))
    source = render(variant)
    assert source.count(right) == 1
    check = check_rows(variant, source.replace(right, wrong), problem, schedules=3)
    assert any(re.search(reported, problem) for problem in check.problems), check.problems


def test_rows_below_the_least_are_found_out(target: Target) -> None:
    """Nobody may hand a fallback kernel rows shorter than its least, because it does not look."""
    problem = Problem.parse("21x512:bf16")
    for variant in fallback_variants(target, [("bf16", "bf16")]):
        if (variant.N, variant.least, variant["vector_bytes"]) == (1536, 1025, 16):
            assert check_rows(variant, render(variant), problem, schedules=1).problems
            return
    pytest.fail("there is no such variant")


def test_program_ends_though_nobody_ends_it(target: Target) -> None:
    program = build(render(plain_variant("43x1024:bf16", target, strategy="separate")))
    with subprocess.Popen([str(program), "1"], stdin=subprocess.PIPE) as process:
        assert process.wait(timeout=patience(30)) == -signal.SIGALRM


STRAIGHT = ("separate", "last_cta", "column_slices", "mailbox")
ONE_TEAM: list[tuple[str, dict[str, int | str], tuple[str, ...]]] = [
    ("43x1024:bf16", {}, STRAIGHT),
    ("43x1002:fp32", {}, ()),
    ("43x1001:bf16", {}, ()),
    ("43x4096:fp16", {"cluster": 2, "threads_per_row": 256}, STRAIGHT),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("shape", "knobs", "straight", "reduction"),
    [
        (*case, reduction)
        for case in ONE_TEAM
        for reduction in REDUCTION
        if not case[1] or reduction in ("separate", "column_slices", "mailbox", "atomic")
    ],
)
def test_single_team_stores_from_its_registers(
    shape: str,
    knobs: dict[str, int | str],
    straight: tuple[str, ...],
    reduction: str,
    target: Target,
) -> None:
    """Whole float4s of it need no shared memory on their way, but where CTAs add to one row: then
    as much as its columns. An access outside is found."""
    variant = plain_variant(
        shape, target, **REDUCTION[reduction], **knobs, pipeline="direct", rows_per_cta=1
    )
    columns = -(-variant.columns // 4) * 4
    assert variant.fold_bytes == (0 if variant["strategy"] in straight else 4 * columns)
    assert check_variant(variant, Problem.parse(shape), schedules=3, seed=0).problems == ()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("shape", ["1x1:fp32", "1x8:bf16", "2x1024:fp16:fp32"])
@pytest.mark.parametrize("reduction", REDUCTION)
def test_few_rows(reduction: str, shape: str, target: Target) -> None:
    served = Problem.parse(shape)
    tuned = Problem(4096, served.N, served.dtype, served.weight_dtype)
    variant = sample_variant(
        tuned, target, SEED, **REDUCTION[reduction], pipeline="direct", cluster=1
    )
    check = check_variant(variant, served, schedules=6, seed=SEED)
    assert check.problems == ()


@pytest.mark.parametrize("reduction", DETERMINISTIC)
def test_many_partial_rows(reduction: str, target: Target) -> None:
    """More partial rows than a tail's lanes read at once, and groups of more than two."""
    variant = plain_variant(
        "333x256:fp32",
        target,
        **{**REDUCTION[reduction], "threads_per_row": 64, "rows_per_cta": 2, "ctas_per_sm": 2},
    )
    problem = Problem.parse("333x256:fp32")
    assert small_launch(variant, problem.M, 150)[1].grid == 150
    check = check_variant(variant, problem, schedules=2, seed=SEED, participants=150, all_rows=True)
    assert check.problems == ()
    assert check.distinct_results == 1


def test_reduced_rows_refill_every_stage(target: Target) -> None:
    variant = plain_variant(
        "65536x1024:bf16", target, **REDUCTION["semaphore"], pipeline="bulk", stages=4
    )
    small = reduced_problem(variant, Problem.parse("65536x1024:bf16"))
    assert small.N == 1024
    batches = small.M // (PARTICIPANTS * variant["rows_per_cta"] * variant.batch_rows)
    assert batches == max(4 + 1, 2 * variant.block_batches + 1)


@pytest.mark.parametrize(("teams", "in_flight"), [(1, 2), (1, 4), (2, 1), (4, 2)])
def test_reduced_rows_end_in_a_batch_that_is_not_full(
    target: Target, teams: int, in_flight: int
) -> None:
    shape = "65536x1024:bf16"
    knobs = REDUCTION["separate"] | {"rows_per_cta": teams, "ctas_per_sm": 2}
    variant = plain_variant(shape, target, **knobs, rows_in_flight=in_flight)
    small = reduced_problem(variant, Problem.parse(shape))
    assert in_flight == 1 or small.M % in_flight
    assert small.M % (teams * in_flight)
