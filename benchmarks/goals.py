"""Checks the rows of a comparison against the goals of its operation on an H200."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import exp, inf, log

from benchmarks.results import Row, problem_of
from generator.operations import RMSNORM_BACKWARD
from generator.problem import Problem
from generator.shape_lists import load_problems

LARGE_BYTES = 400e6
MEAN_LIMITS = {RMSNORM_BACKWARD.name: 1.12, "layernorm_backward": 1.08}
"""Limits of the ratio to the floor, its geometric mean, by operation."""
BF16_LIMITS = {
    "65536x3072, 65536x8192, 16384x16384": 1.06,
    "4096x16384, 4096x32768, 4096x65536": 1.12,
    "4096x4096, 4096x8192": 1.12,
    "4096x1024, 4096x2048": 1.18,
}
"""Limits of the ratio to the floor, at each of these shapes in bf16."""


@dataclass(frozen=True)
class Goal:
    """One goal and how far the rows are from it. met is None when shapes that it speaks of were
    not measured and those that were keep to it."""

    text: str
    limit: str
    reached: str
    met: bool | None


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean of positive numbers; infinity for none, and when one is
    infinite."""
    logs = [log(value) if value < inf else inf for value in values]
    return exp(sum(logs) / len(logs)) if logs and max(logs) < inf else inf


def ratio(row: Row) -> float:
    """Ours over the floor; infinity where ours could not be measured."""
    return row["ours_us"] / row["add_us"] if row["ours_us"] is not None else inf


def best_peer(row: Row) -> tuple[str, float] | None:
    """Name and microseconds of the fastest peer that was measured; the first of equals."""
    times = [(cell["us"], name) for name, cell in row["peers"].items() if cell["us"] is not None]
    if not times:
        return None
    us, name = min(times, key=lambda entry: entry[0])
    return name, us


def goals(rows: Sequence[Row], operation: str = RMSNORM_BACKWARD.name) -> list[Goal]:
    """Every goal of the operation that the rows can answer, in the order in which they were set."""
    every = load_problems("compare")
    plain = {
        problem_of(row): row
        for row in rows
        if row.get("weight_dtype", row["dtype"]) == row["dtype"]
    }
    compared = [problem for problem in every if problem in plain]
    mean = geometric_mean(ratio(plain[problem]) for problem in compared)
    limit = MEAN_LIMITS[operation]
    overall = Goal(
        f"all {len(every)} shapes, geometric mean",
        f"≤ {limit} floor",
        f"{mean:.3f} ({len(compared)} shapes)" if compared else "not measured",
        _verdict(mean <= limit, compared, every),
    )
    against_peers = _against_peers(plain, compared, every)
    if operation != RMSNORM_BACKWARD.name:
        return [overall, against_peers[0]]
    return [overall, *_by_class(plain, every), _fp32_weight(rows), *against_peers]


def _by_class(plain: dict[Problem, Row], every: Sequence[Problem]) -> list[Goal]:
    """The goals of RMSNorm's backward for shapes of a kind."""

    def each(text: str, limit: float, wanted: Sequence[Problem]) -> Goal:
        said = (f"{text}, each", f"≤ {limit:.2f} floor")
        return _each(*said, limit, wanted, plain, ratio, "{:.3f}")

    def bf16(shapes: str) -> list[Problem]:
        return [Problem.parse(f"{shape}:bf16") for shape in shapes.split(", ")]

    def behind(row: Row) -> float:
        return inf if row["ours_us"] is None else row["ours_us"] - row["add_us"]

    large = [p for p in every if RMSNORM_BACKWARD.traffic_bytes(p) >= LARGE_BYTES]
    short = "4096x256, 4096x512"
    other = [p for p in every if p.dtype != "bf16" and p.M == 4096 and p.N >= 4096]
    return [
        each("traffic ≥ 400 MB", 1.05, large),
        *(each(text, limit, bf16(text)) for text, limit in BF16_LIMITS.items()),
        _each(
            f"{short}, each",
            "≤ floor + 2.5 µs",
            2.5,
            bf16(short),
            plain,
            behind,
            "floor + {:.2f} µs",
        ),
        each("fp32 and fp16 at M=4096, N ≥ 4096", 1.10, other),
    ]


def _verdict(kept: bool, measured: Sequence[object], wanted: Sequence[object]) -> bool | None:
    if not kept and measured:
        return False
    return True if len(measured) == len(wanted) and wanted else None


def _each(
    text: str,
    limit_text: str,
    limit: float,
    wanted: Sequence[Problem],
    rows: dict[Problem, Row],
    value: Callable[[Row], float],
    form: str,
) -> Goal:
    """A goal that every one of the wanted problems has to keep."""
    values = {problem: value(rows[problem]) for problem in wanted if problem in rows}
    if not values:
        return Goal(text, limit_text, "not measured", None)
    worst = max(values, key=lambda problem: values[problem])
    reached = f"{form.format(values[worst])} at worst ({worst}; {len(values)} of {len(wanted)})"
    return Goal(text, limit_text, reached, _verdict(values[worst] <= limit, [*values], wanted))


def _fp32_weight(rows: Sequence[Row]) -> Goal:
    text, limit = "bf16 x with fp32 weight, each", "≤ 1.03 of the bf16 weight"
    cost = {}
    for row in rows:
        problem, plain_us = problem_of(row), row.get("plain_weight_us")
        if (problem.dtype, problem.weight_dtype) == ("bf16", "fp32") and plain_us is not None:
            cost[problem] = inf if row["ours_us"] is None else row["ours_us"] / plain_us
    if not cost:
        return Goal(text, limit, "not measured", None)
    worst = max(cost, key=lambda problem: cost[problem])
    return Goal(text, limit, f"{cost[worst]:.3f} at worst ({worst})", cost[worst] <= 1.03)


def _against_peers(
    rows: dict[Problem, Row], compared: Sequence[Problem], every: Sequence[Problem]
) -> list[Goal]:
    faster = {}
    for problem in compared:
        best = best_peer(rows[problem])
        if best is not None:
            ours = rows[problem]["ours_us"]
            faster[problem] = best[1] / ours if ours is not None else 0.0
    worst, typical = "not measured", "not measured"
    least = mean = 0.0
    if faster:
        where = min(faster, key=lambda problem: faster[problem])
        least = faster[where]
        mean = geometric_mean(faster.values()) if least else 0.0
        worst, typical = f"{least:.3f} at worst ({where})", f"{mean:.3f}"
    text, found = "faster than the best peer", [*faster]
    return [
        Goal(f"{text}, each", "≥ 1.00", worst, _verdict(least >= 1, found, every)),
        Goal(f"{text}, geometric mean", "≥ 1.15", typical, _verdict(mean >= 1.15, found, every)),
    ]
