"""Kernels with a warp of its own that asks for rows: right under every schedule, and wrong where a
bug is planted."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from generator.emulate import find_compiler
from generator.emulate.check import check_source, check_variant, small_launch
from generator.emulate.run import Layout, Schedule, run_schedules
from generator.errors import NormforgeError
from generator.kernels.render import render
from generator.kernels.variant import Variant, make_variant
from generator.operations.rmsnorm_backward import make_inputs
from generator.problem import Problem
from generator.space.legal_configs import LegalConfigs
from generator.space.load import load_space
from tests.support.emulator import WITHOUT_DX
from tests.support.forward import H200
from tests.support.samples import plain_variant

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

SPACE = load_space()
SHAPES = (
    "64x512:bf16",
    "100x1024:fp16",
    "64x4096:fp32",
    "100x1024:bf16+residual",
    "60x8192:bf16+residual_fp32",
    "100x1024:bf16:fp32+offset",
    "layernorm_backward:100x1024:bf16",
)


def drawn(shape: str, count: int) -> list[Variant]:
    """Random kernels with a producer."""
    problem, rng = Problem.parse(shape), random.Random(shape)
    legal, found = LegalConfigs(SPACE, problem, H200), []
    while len(found) < count:
        config = legal.draw(rng, ())
        if config is not None and config["pipeline"] == "producer":
            found.append(make_variant(config, problem))
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_random_kernels_are_right_under_every_schedule(shape: str) -> None:
    """Rows of the last one lie apart, those of every tensor by another stride."""
    problem = Problem.parse(shape)
    vector = 16 // problem.itemsize
    apart = Layout((vector, 3 * vector, 2 * vector, 5 * vector, 4 * vector))
    for variant, layout in zip(drawn(shape, 3), (Layout(), Layout(), apart), strict=True):
        check = check_variant(variant, problem, schedules=4, layout=layout)
        assert check.passed, (variant, check.problems)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_many_random_kernels_are_right_under_many_schedules(shape: str) -> None:
    for variant in drawn(shape, 12):
        check = check_variant(variant, Problem.parse(shape), schedules=8)
        assert check.passed, (variant, check.problems)


def example(**knobs: Any) -> tuple[Variant, Problem]:
    shape = "100x4096:fp32" if knobs.get("cluster", 1) > 1 else "100x1024:bf16"
    if knobs.get("row_numbers") == "held":
        shape = "600x1024:bf16"  # more batches than a lane holds numbers at once
    fixed = {"pipeline": "producer", "threads_per_row": 64, "rows_per_cta": 2, "stages": 3}
    problem = Problem.parse(shape)
    config = {**plain_variant(problem, H200).config, "column_sums": "late", **fixed, **knobs}
    return make_variant(config, problem), problem


FENCE = "  if (threadIdx.x == 0) mbarrier_init_fence();  // it has initialised all barriers\n"
PUBLISHED = """\
  // Publishes them to the CTA, and in a cluster also to those that send to it. Whatever else is in
  // shared memory has barriers of its own.
"""
BUGS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "reads are not fenced before a stage is handed back": (
        "    fence_async_shared();\n    warp_barrier();",
        "    warp_barrier();",
        "no proxy fence: hands a stage back",
        {},
    ),
    "a stage is handed back before it is read": (
        "    pipeline.await();\n    pipeline.read(xs, dys, batch);\n",
        "    pipeline.await();\n    pipeline.release();\n    pipeline.read(xs, dys, batch);\n",
        "",
        {},
    ),
    "one warp hands a stage back for all": (
        "mbarrier_init(&empty[s], kWarpsPerRow);",
        "mbarrier_init(&empty[s], 1);",
        "",
        {"threads_per_row": 128},
    ),
    "the producer does not wait for a stage": (
        "        mbarrier_wait(&empty[team * kStages + into], turn);\n",
        "",
        "",
        {},
    ),
    "the producer waits for a phase too many": (
        "unsigned turn = 1;",
        "unsigned turn = 0;",
        "deadlock",
        {},
    ),
    "too few bytes are expected": (
        "valid * (2 * kRowBytes + kResidualRowBytes)",
        "valid * (kRowBytes)",
        "",
        {},
    ),
    "rows of the next team are asked for": (
        "fetch(batch + team, team",
        "fetch(batch + (team + 1) % kTeams, team",
        "",
        {},
    ),
    "a team meets at the barrier of the CTA": (
        "named_barrier(1 + team_index(), kThreadsPerRow)",
        "cta_barrier()",
        "",
        {},
    ),
    "teams read weights that are not all written": (
        "  named_barrier(1 + kTeams, kThreads);",
        "",
        "race",
        {"weight_in": "smem"},
    ),
    "a cluster relies on weights that its relaxed barrier does not order": (
        "  named_barrier(1 + kTeams, kThreads);",
        "",
        "race",
        {"weight_in": "smem", "cluster": 2},
    ),
    "barriers are not fenced before the relaxed barrier of the cluster": (
        FENCE,
        "",
        "whose initialisation no barrier orders",
        {"cluster": 2},
    ),
    "barriers are fenced behind the relaxed barrier of the cluster": (
        f"{FENCE}{PUBLISHED}  cluster_barrier_of_inits();\n",
        f"  cluster_barrier_of_inits();\n{FENCE}",
        "whose initialisation no barrier orders",
        {"cluster": 2},
    ),
    "barriers are not fenced before the copy engine uses them": (
        FENCE,
        "",
        "no proxy fence: a bulk copy uses mbarrier",
        {},
    ),
    "a barrier of the CTA stands in for the fence that peers need": (
        FENCE,
        "  cta_barrier();\n",
        "initialisation was not fenced",
        {"cluster": 2},
    ),
    "half a warp elects the lane that asks": (
        "    if (!elected()) return;",
        "    if (threadIdx.x % 32 >= 16 || !elected()) return;",
        "",
        {},
    ),
    "one thread asks for the index of its warp": (
        "warp = warp_index(),",
        "warp = threadIdx.x == 0 ? warp_index() : threadIdx.x / 32,",
        "",
        {},
    ),
    "a lane holds the number of another row": (
        "batch + lane / kRowsInFlight * step",
        "batch + lane / kRowsInFlight",
        "",
        {"row_numbers": "held"},
    ),
    "the next numbers are taken a batch too early": (
        "if (++taken < kHeldBatches) return;",
        "if (++taken < kHeldBatches - 1) return;",
        "",
        {"row_numbers": "held"},
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_found(name: str) -> None:
    old, new, said, knobs = BUGS[name]
    variant, problem = example(**knobs)
    source = render(variant)
    assert old in source
    spec, launch = small_launch(variant, problem.M)
    check = check_source(source.replace(old, new), spec, launch, problem, schedules=16)
    assert any(said in problem for problem in check.problems), check.problems
    assert check_source(source, spec, launch, problem, schedules=4).passed


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"threads_per_row": 16}, "parts of warps"),
        ({"rows_per_cta": 15, "threads_per_row": 32}, "15 teams"),
        ({"column_sums": "early", "reload": "smem"}, "early sums"),
        ({"row_numbers": "held", "rows_in_flight": 3}, "numbers of rows that are held"),
    ],
)
def test_kernels_that_there_cannot_be(knobs: dict[str, Any], said: str) -> None:
    variant, problem = example()
    with pytest.raises(NormforgeError, match=said):
        make_variant({**variant.config, **knobs}, problem)


@pytest.mark.parametrize("column_sums", ["late", "early"])
def test_rows_that_nobody_wants_are_not_stored(column_sums: str) -> None:
    """The sums over the rows are the same."""
    variant, problem = example(column_sums=column_sums)
    spec, launch = small_launch(variant, problem.M)
    inputs, source = make_inputs(problem, torch.device("cpu")), render(variant)
    schedules = [Schedule(seed, launch.grid) for seed in range(3)]
    both = run_schedules(source, spec, launch, inputs, schedules)
    alone = run_schedules(source, spec, launch, inputs, schedules, call_options=WITHOUT_DX)
    assert not both.faults and not alone.faults
    assert "dx" in both.results and "dx" not in alone.results
    (one,), (other,) = both.results["dw"], alone.results["dw"]
    assert torch.equal(one, other)


def test_early_sums_need_a_template_that_has_them() -> None:
    problem = Problem.parse("100x1024:bf16", "gated_rmsnorm_backward")
    config = {**example()[0].config, "column_sums": "early"}
    with pytest.raises(NormforgeError, match="whose template does not add early"):
        make_variant(config, problem)
    make_variant({**config, "column_sums": "late"}, problem)
