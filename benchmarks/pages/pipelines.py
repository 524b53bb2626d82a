"""Measured numbers of kernels with a producer, and of the two conditions of timing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import fmean, median

from benchmarks.goals import geometric_mean
from benchmarks.packages import SIDES
from benchmarks.pages.text import read, table
from generator.evaluate.gpu.rotation import CONDITIONS, FLUSH, ROTATION

GPUS = ("h200", "h100")


def pipelines() -> str:
    """The package's kernel and the fastest one with a producer, over the floor, and their ratio."""
    columns: list[list[str]] = []
    shapes: list[str] = []
    for gpu in GPUS:
        for condition in CONDITIONS:
            rows = read(f"pipelines_{gpu}")["rows"]
            shapes = [row["shape"] for row in rows]
            before = [row["package_ratio"][condition] for row in rows]
            now = [row["best_ratio"][condition] for row in rows]
            cells = [f"{a:.3f}, {b:.3f}" for a, b in zip(before, now, strict=True)]
            mean = geometric_mean([b / a for a, b in zip(before, now, strict=True)])
            columns.append([*cells, f"{mean:.3f}"])
    header = [f"{gpu.upper()}, {condition}" for gpu in GPUS for condition in CONDITIONS]
    names = [*shapes, "mean of the ratios"]
    return table(("shape", *header), [(n, *own) for n, *own in zip(names, *columns, strict=True)])


def conditions() -> str:
    """Tabulate how well either condition separates configs, and whether they agree."""
    found = []
    for gpu in GPUS:
        rows = read(f"conditions_{gpu}")["rows"]
        said = [row["summary"] for row in rows]
        for condition in CONDITIONS:
            other = ROTATION if condition == FLUSH else FLUSH
            own = [each[condition] for each in said]
            losses = {c: max(each["loss_in_finals"][c] for each in own) for c in (condition, other)}
            found.append(
                (
                    f"{gpu.upper()}, {condition}",
                    f"{fmean(each['tau_halves']['finals'] for each in own):.2f}",
                    f"{fmean(each['tau']['finals'] for each in said):.2f}",
                    f"{fmean(each['tau_to_finals'][condition] for each in own):.2f}",
                    f"{100 * median(each['spread']['trials'] for each in own):.1f} %",
                    f"{1e3 * median(row[condition]['trial_seconds'] for row in rows):.0f} ms",
                    f"{100 * losses[condition]:.1f} %, {100 * losses[other]:.1f} %",
                    f"{geometric_mean([each['hint'] for each in own]):.3f}",
                )
            )
    header = ("GPU, condition", "halves", "with the other", "trials with finals", "spread")
    return table((*header, "a trial", "worst first trial", "evict_last"), found)


def packages(part: str) -> str:
    """The kernels of a package beside those of the one before it: how many shapes have another one,
    both over the floor, and the ratio of their times."""
    found = []
    rows = read(f"packages_{part}")["rows"]
    for which, some in (
        ("all", rows),
        ("with another kernel", [r for r in rows if len({*r["kernels"].values()}) > 1]),
        ("with the same", [r for r in rows if len({*r["kernels"].values()}) == 1]),
    ):
        for condition in CONDITIONS:
            times = [row[condition] for row in some]
            ratios = [each["after_over_before"] for each in times]
            found.append(
                (
                    f"{which}, {condition}",
                    str(len(some)),
                    *(f"{geometric_mean(each[side] for each in times):.3f}" for side in SIDES),
                    f"{geometric_mean(ratios):.3f}",
                    f"{min(ratios):.3f}, {max(ratios):.3f}",
                )
            )
    return table(("shapes, condition", "number", *SIDES, "ratio", "least, most"), found)


PIPELINE_BLOCKS: dict[str, Callable[[], str]] = {
    "pipelines": pipelines,
    "conditions": conditions,
    **{
        f"packages_{part}": partial(packages, part)
        for part in (*GPUS, "more_h100", "layernorm_h200")
    },
}
