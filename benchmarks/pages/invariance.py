"""Blocks on the price of batch invariance: its kernels beside the usual ones."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.goals import geometric_mean
from benchmarks.pages.method import tuned_ratios
from benchmarks.pages.text import read, table
from generator.evaluate.gpu.rotation import FLUSH, ROTATION
from generator.problem import Problem

PRICE = "invariance_price_h200"
"""The results of benchmarks.packages, with the usual kernels as those of before."""


def finals_of_h100() -> tuple[list[float], list[float]]:
    """Return the times of the H100's batch-invariant winners over those of its usual ones, and over
    the floor, each from its own finals."""
    free, ours = (
        tuned_ratios(operation, "h100")
        for operation in ("rmsnorm_backward", "rmsnorm_invariant_backward")
    )
    return [ours[shape] / free[shape] for shape in ours if shape in free], list(ours.values())


def overhead_of_invariance_in_short() -> str:
    """Tabulate the overhead of batch invariance in the mean."""

    def line(what: str, overhead: Sequence[float], floor: Sequence[float]) -> tuple[str, ...]:
        mean, of_floor = (f"{geometric_mean(found):.3f}" for found in (overhead, floor))
        return (what, str(len(overhead)), mean, f"{max(overhead):.3f}", of_floor)

    rows = []
    for condition in (ROTATION, FLUSH):
        times = [row[condition] for row in read(PRICE)["rows"]]
        ratios = [each["after_over_before"] for each in times]
        rows.append(line(f"H200, {condition}", ratios, [each["after"] for each in times]))
    rows.append(line("H100, in finals of different days", *finals_of_h100()))
    header = ("GPU", "shapes", "time / usual kernel's (geometric mean)", "largest", "time / floor")
    return table(header, rows)


def overhead_of_invariance() -> str:
    """Tabulate the overhead of batch invariance at each shape on the H200, under rotation."""
    times = {}
    for row in read(PRICE)["rows"]:
        problem = Problem.parse(row["shape"])
        times[problem.M, problem.N, problem.dtype] = row[ROTATION]
    batches = sorted({M for M, _, _ in times})
    widths = sorted({(dtype, N) for _, N, dtype in times})

    def cell(M: int, N: int, dtype: str) -> str:
        found = times.get((M, N, dtype))
        return f"{found['after_over_before']:.2f} ({found['after']:.2f})" if found else ""

    rows = [(f"{N}, {dtype}", *(cell(M, N, dtype) for M in batches)) for dtype, N in widths]
    return table(("N, dtype", *(f"M = {M}" for M in batches)), rows)


INVARIANCE_BLOCKS = {
    "overhead_of_invariance": overhead_of_invariance,
    "overhead_of_invariance_in_short": overhead_of_invariance_in_short,
}
