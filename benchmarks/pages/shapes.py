"""The backward at few rows, and at five shapes beside all peers under both conditions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.goals import geometric_mean
from benchmarks.pages.comparison import comparison
from benchmarks.pages.text import paragraph, read, table
from generator.evaluate.gpu.rotation import CONDITIONS


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


def _mean(ratios: Iterable[float]) -> str:
    return f"{geometric_mean(ratios):.2f}"


def _of(row: dict[str, Any], kernel: str) -> float:
    return next(float(own["ratio"]) for own in row["kernels"] if own["kernel"] == kernel)


def both_conditions() -> str:
    """Ours and all peers over the floor under either condition."""
    found = {condition: comparison(f"five_{condition}_h200") for condition in CONDITIONS}
    ours = [f"**{one.ours:.3f}**" for one in found.values()]
    lines = [["**Normforge**", *ours, "", ""]]
    standings = {
        condition: {peer.name: peer for peer in one.standings} for condition, one in found.items()
    }
    for peer in next(iter(found.values())).standings:
        over = [f"{standings[condition][peer.name].over_floor:.3f}" for condition in found]
        least = [f"{min(one.over_ours(peer.name).values()):.3f}" for one in found.values()]
        shapes = f" ({peer.shapes} shape)" if peer.shapes == 1 else ""
        lines.append([f"{peer.title} {peer.version}{shapes}", *over, *least])
    header = [f"time / floor, {condition}" for condition in found]
    header += [f"lowest time / Normforge's, {condition}" for condition in found]
    shown = table(["", *header], lines)
    rotation = found["rotation"]
    lowest, where = rotation.least
    said = paragraph(
        f"Under rotation, the closest peer of a shape takes {100 * (lowest - 1):.1f} % longer than"
        f" Normforge, at {where}."
        if lowest > 1
        else f"Under rotation, a peer takes {lowest:.3f} of Normforge's time, at {where}."
    )
    return f"{shown}\n\n{said}"


SHAPE_BLOCKS = {"few_rows": few_rows, "both_conditions": both_conditions}
