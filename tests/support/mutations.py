"""The helpers of tests that plant bugs: a mutation of a rendered kernel, and how it is run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from generator.emulate.check import Check, check_source, small_launch
from generator.kernels.render import render
from generator.kernels.variant import Variant
from generator.problem import Problem
from generator.target import Target
from tests.support.samples import BY_TEMPLATE, REDUCTION, plain_variant

SCHEDULES = 200
FIRST_SCHEDULES = 5


@dataclass(frozen=True)
class Mutation:
    """`old` becomes `new` in so many places of the source of the reduction kind with the knobs; a
    problem that matches `found` has to be reported. residency: None lets it vary; deadline: seconds
    for all schedules."""

    reduction: str
    old: str
    new: str
    found: str
    knobs: dict[str, int | str] = field(default_factory=dict)
    shape: str = "43x1024:bf16"
    residency: int | None = None
    places: int = 1
    deadline: float = 60.0
    schedules: int = SCHEDULES


BULK = {"pipeline": "bulk", "stages": 2}
ASYNC = {"pipeline": "async", "stages": 2}
SHORT = {"threads_per_row": 8, "rows_per_cta": 2}
EARLY: dict[str, int | str] = {"arrival": "early"}
PAIR = {"threads_per_row": 256, "rows_per_cta": 1, "cluster": 2}
TEAMS = {"threads_per_row": 32, "rows_per_cta": 8}
CLOSING: tuple[tuple[str, dict[str, int | str]], ...] = (
    ("1400x256:fp32", {**BULK, **TEAMS}),
    ("181x4096:bf16", {**BULK, **PAIR, "rows_in_flight": 4}),
)
"""Shapes and knobs of which most teams have two blocks of rows, without and with clusters."""

BOOKED = "      const Ledger before = book_and_read(ledger(), kHandover);\n"
IMPATIENT = BOOKED  # hands over whenever it finds that not all have arrived, which is allowed
PATIENT = (
    "      if (starts(seen) == participants) continue;\n"
    "      if (handed_over(seen) == 0 && ++looks < kPatience) continue;\n" + BOOKED
)
HANDOVER = (
    "      if (!complete(before)) {\n"
    "        store_relaxed(list() + handed_over(before), place + 1);\n"
    "        return false;\n      }\n"
)


def make(mutation: Mutation, target: Target) -> Variant:
    knobs = {**REDUCTION[mutation.reduction], **mutation.knobs}
    if BY_TEMPLATE[mutation.reduction].launches > 1:  # a small second kernel, for speed
        knobs = {"slice_columns": 128, "sum_threads": 128, **knobs}
    return plain_variant(mutation.shape, target, **knobs)


def run(mutation: Mutation, source: str, variant: Variant, schedules: int | None = None) -> Check:
    problem = Problem.parse(mutation.shape)
    spec, launch = small_launch(variant, problem.M)
    residencies = None
    if mutation.residency is not None:
        residencies = (mutation.residency,)
    return check_source(
        source,
        spec,
        launch,
        problem,
        schedules=schedules or mutation.schedules,
        residencies=residencies,
        deadline=mutation.deadline,
    )


def check_planted(mutation: Mutation, target: Target) -> None:
    """The bug is found and named, most often by the first few of the schedules."""
    variant = make(mutation, target)
    source = render(variant)
    places = source.count(mutation.old)
    assert places == mutation.places, "the template has changed: plant the bug anew"
    broken = source.replace(mutation.old, mutation.new)
    for schedules in (FIRST_SCHEDULES, mutation.schedules):
        check = run(mutation, broken, variant, schedules)
        if found := any(re.search(mutation.found, problem) for problem in check.problems):
            break
    assert found, check.problems
    assert all(problem.startswith(variant.id + ": ") for problem in check.problems)


def untouched(planted: Mapping[str, Mutation]) -> dict[str, Mutation]:
    """Return one mutation for every different source of these."""
    first: dict[tuple[object, ...], str] = {}
    for name, m in planted.items():
        first.setdefault((m.reduction, tuple(sorted(m.knobs.items())), m.shape, m.residency), name)
    return {name: planted[name] for name in first.values()}


def check_untouched(mutation: Mutation, target: Target) -> None:
    """The kernel as it stands passes all schedules."""
    variant = make(mutation, target)
    check = run(mutation, render(variant), variant, SCHEDULES)
    assert check.problems == (), check.problems
    assert check.schedules == SCHEDULES
