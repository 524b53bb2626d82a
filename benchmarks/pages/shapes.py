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
    by_rows: dict[int, list[dict[str, Any]]] = {}
    for row in read("few_rows_h200")["rows"]:
        by_rows.setdefault(int(row["shape"].split("x")[0]), []).append(row)
    lines = []
    for M, rows in sorted(by_rows.items()):
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
    by_rows: dict[int, list[dict[str, Any]]] = {}
    for row in read("packages_more_h100")["rows"]:
        M = int(row["shape"].split("x")[0])
        if M <= MOST_FEW:
            by_rows.setdefault(M, []).append(row["rotation"])
    lines = [
        (
            str(M),
            str(len(rows)),
            _mean(each["before"] for each in rows),
            _mean(each["after"] for each in rows),
            f"{max(each['floor_us'] * (each['after'] - 1) for each in rows):.1f} us",
        )
        for M, rows in sorted(by_rows.items())
    ]
    return table(("M", "shapes", "before", "tuned", "most above the floor"), lines)


def _mean(ratios: Iterable[float]) -> str:
    return f"{geometric_mean(ratios):.2f}"


def _of(row: dict[str, Any], kernel: str) -> float:
    return next(float(own["ratio"]) for own in row["kernels"] if own["kernel"] == kernel)


SHAPE_BLOCKS = {"few_rows": few_rows, "few_rows_tuned": few_rows_tuned}
