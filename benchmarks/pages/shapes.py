"""Measured numbers about the backward at few rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.goals import geometric_mean
from benchmarks.pages.text import read, table

MOST_FEW = 256
"""The most rows that count as few in the list of shapes of that name."""


def few_rows() -> str:
    """Kernels of the nearest tuned M beside fallback kernels, by the number of rows."""
    lines = []
    for M, rows in _by_rows("few_rows_h200"):
        nearest = [_of(row, row["chosen"]) for row in rows]
        fallback = [
            [kernel["ratio"] for kernel in row["kernels"] if kernel["how"] == "fallback"]
            for row in rows
        ]
        fastest, slowest = map(min, fallback), map(max, fallback)
        lines.append(
            (
                str(M),
                str(len(rows)),
                f"{geometric_mean(nearest):.2f}, {max(nearest):.1f}",
                f"{_mean(fastest)} to {_mean(slowest)}",
                _mean(row["aten"] for row in rows),
            )
        )
    header = ("M", "shapes", "kernel of the nearest tuned M: mean, slowest")
    return table((*header, "fallback kernels: fastest to slowest", "ATen"), lines)


def few_rows_tuned() -> str:
    """Kernels that were tuned for few rows beside those that served these before, under
    rotation."""
    lines = []
    for M, rows in _by_rows("packages_more_h100"):
        times = [row["rotation"] for row in rows]
        above = max(each["floor_us"] * (each["after"] - 1) for each in times)
        means = (_mean(each[side] for each in times) for side in ("before", "after"))
        if M <= MOST_FEW:
            lines.append((str(M), str(len(rows)), *means, f"{above:.1f} us"))
    return table(("M", "shapes", "before", "tuned", "most above the floor"), lines)


def _by_rows(name: str) -> list[tuple[int, list[dict[str, Any]]]]:
    """Return the rows of a results file by their M, the least first."""
    found: dict[int, list[dict[str, Any]]] = {}
    for row in read(name)["rows"]:
        found.setdefault(int(row["shape"].split("x")[0]), []).append(row)
    return sorted(found.items())


def _mean(ratios: Iterable[float]) -> str:
    return f"{geometric_mean(ratios):.2f}"


def _of(row: dict[str, Any], kernel: str) -> float:
    return next(float(own["ratio"]) for own in row["kernels"] if own["kernel"] == kernel)


SHAPE_BLOCKS = {"few_rows": few_rows, "few_rows_tuned": few_rows_tuned}
