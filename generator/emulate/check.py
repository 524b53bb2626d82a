"""Checks on the emulator that a variant computes what it should, with the same bits under every
schedule."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from generator.emulate.build import NO_COMPILER, find_compiler
from generator.emulate.run import Runs, Schedule, run_schedules
from generator.evaluate.verify.accuracy import compare_all
from generator.kernels.render import render
from generator.kernels.variant import Variant
from generator.operations import operation_of
from generator.operations.operation import Bound
from generator.problem import Problem
from normforge.spec import CHUNK_ROWS, KernelSpec, Launch, plan_launch

PARTICIPANTS = 5
"""CTAs (or clusters) that an emulated grid has at most: two levels of groups, the last one ragged,
and several batches for every CTA at a small M."""
MOST_ELEMENTS = 1 << 21
"""The most elements of a matrix, where a reduced problem takes more rows than its stages and blocks
need."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Check:
    """The findings of many schedules of one variant.

    schedules: how many ran; 0 when `note` says why none could. distinct_results: different outputs,
    bit by bit, of schedules without a fault, on inputs whose sums over rows cancel. errors: by
    output, the largest ||out - ref|| / ||ref|| against float64 on ordinary inputs. problems:
    different faults, each with a schedule that shows it.
    """

    variant: str
    schedules: int
    distinct_results: int = 0
    errors: Mapping[str, float] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    note: str = ""

    @property
    def passed(self) -> bool:
        """True when the schedules were run and none of them found anything."""
        return self.schedules > 0 and not self.problems


def small_launch(
    variant: Variant, M: int, participants: int = PARTICIPANTS
) -> tuple[KernelSpec, Launch]:
    """A launch of the variant with the grid of a GPU so small that `participants` CTAs or clusters
    fill it, or as many as its grid is a multiple of."""
    participants = max(participants, variant.grid_step)
    sms = participants * variant["cluster"] + variant["spare_sms"]
    spec = replace(variant.spec(sms), ctas_per_sm=1)
    return spec, plan_launch(spec, M)


def reduced_problem(
    variant: Variant, problem: Problem, participants: int = PARTICIPANTS
) -> Problem:
    """The problem with few rows: enough that every stage of every CTA is refilled and every team
    adds the sum of a second block to that of its first and goes on, and a last batch that is not
    full where there can be one."""
    participants = max(participants, variant.grid_step)
    batch = variant["rows_per_cta"] * variant.batch_rows
    rest = batch // 2 + 1 if batch > 2 else 1
    rounds = max(variant["stages"] + 1, 2 * variant.block_batches + 1)
    rows = participants * batch * rounds + rest
    if variant.run_rows:
        # Short rows take several chunks: whole groups, and runs behind them.
        rows = max(rows, min(2 * CHUNK_ROWS + 300, MOST_ELEMENTS // variant.N))
    return replace(problem, M=min(problem.M, rows))


def default_residencies(spec: KernelSpec, grid: int) -> tuple[int, ...]:
    """One CTA (or cluster), about half of the grid, all of it."""
    return tuple(sorted({spec.cluster, max(spec.cluster, (grid + 1) // 2), grid}))


def check_variant(
    variant: Variant,
    problem: Problem,
    *,
    participants: int = PARTICIPANTS,
    all_rows: bool = False,
    **options: Any,
) -> Check:
    """Run the variant on a small grid and, unless `all_rows`, few of the problem's rows. options:
    of `check_source`. Without a C++ compiler nothing is run, and the check's note says so."""
    if find_compiler() is None:
        return Check(variant.id, 0, note=NO_COMPILER)
    small = problem if all_rows else reduced_problem(variant, problem, participants)
    spec, launch = small_launch(variant, small.M, participants)
    return check_source(render(variant), spec, launch, small, **options)


def check_source(
    source: str,
    spec: KernelSpec,
    launch: Launch,
    problem: Problem,
    *,
    schedules: int = 12,
    residencies: Sequence[int] | None = None,
    seed: int = 0,
    **options: Any,
) -> Check:
    """Run a source under `schedules` schedules (seeds from `seed` on, residencies in turn).
    options: of `run_schedules`. Raises NormforgeError as that does."""
    residencies = residencies or default_residencies(spec, launch.grid)
    operation = operation_of(problem)
    plain = operation.make_inputs(problem, CPU)
    cancelling = operation.make_cancelling(problem, plain)
    chosen = [
        Schedule(seed + i, residencies[i % len(residencies)]) for i in range(max(1, schedules))
    ]
    problems: dict[str, str] = {}
    errors: dict[str, float] = {}
    runs = Runs()
    # The last to run are the schedules that are counted.
    for inputs, some in ((plain, chosen[: len(residencies)]), (cancelling, chosen)):
        runs = run_schedules(source, spec, launch, inputs, some, **options)
        found, wrong = _accuracy(runs, operation.bounds(problem, inputs))
        if inputs is plain:
            errors = found
        for outcome in runs.outcomes:
            if outcome.fault:
                # Faults that differ in the CTA or the thread only are one.
                alike = re.sub(r"\d+", "#", outcome.fault)
                problems.setdefault(alike, f"{outcome.fault} [{outcome.schedule}]")
        problems.update(dict.fromkeys(wrong, ""))
    if spec.determinism != "none" and runs.distinct_results > 1:
        count = runs.distinct_results
        problems[f"{count} different results, and the variant claims {spec.determinism}"] = ""
    return Check(
        variant=spec.name,
        schedules=len(runs.outcomes),
        distinct_results=runs.distinct_results,
        errors=errors,
        problems=tuple(f"{spec.name}: {shown or text}" for text, shown in problems.items()),
    )


def _accuracy(runs: Runs, expected: Mapping[str, Bound]) -> tuple[dict[str, float], list[str]]:
    """The largest error of each output, and what is outside the error bounds."""
    errors: dict[str, float] = {}
    wrong: list[str] = []
    for name, results in runs.results.items():
        for out in results:
            accuracy = compare_all({name: out}, {name: expected[name]})
            errors[name] = max(errors.get(name, 0.0), accuracy.errors[name])
            if accuracy.fault:
                wrong.append(accuracy.fault)
    return errors, wrong
