"""Summarises the steps of a results file: gains over PyTorch's norm, with their uncertainty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import comb
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.pages import text as page_text
from benchmarks.training.model import MODELS
from benchmarks.training.steps import Case
from benchmarks.training.ways import BASELINE, MODES, WAYS

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Gain:
    """PyTorch's time for a step over another norm's: the median over processes, and the interval
    that has the true median with a probability of at least CONFIDENCE, or all there is where it
    takes more processes for that (six)."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Gain:
        """Estimate the gain by order statistics: how many of n values lie below the median is
        binomial, whatever their distribution (Conover, Practical Nonparametric Statistics, 3.2)."""
        ordered, n = sorted(ratios), len(ratios)
        left, below = 0, 0.0
        while left < n // 2 and below + comb(n, left) / 2**n <= (1 - CONFIDENCE) / 2:
            below += comb(n, left) / 2**n
            left += 1
        first = max(0, left - 1)
        return cls(median(ordered), ordered[first], ordered[n - 1 - first])

    def __str__(self) -> str:
        return f"{self.median:.3f} ± {max(self.high - self.median, self.median - self.low):.3f}"


@dataclass(frozen=True)
class Measured:
    """One case of a results file. processes: what `steps.measure` returned in each."""

    case: Case
    processes: Sequence[Mapping[str, Any]]

    @property
    def title(self) -> str:
        more = ", checkpointed" if self.case.checkpointed else ""
        widths = MODELS[self.case.model]
        return f"{widths.title}, sequences of {self.case.length}, {MODES[self.case.mode]}{more}"

    @cached_property
    def gains(self) -> dict[str, Gain]:
        """The gains of every way that was measured, but the baseline. A process counts once, with
        the median over its pairs of the same round: rounds of one process share its clocks,
        addresses and compiled code, and say little of the next one's."""
        found = {}
        for name in WAYS:
            medians = [
                median(base / own for base, own in zip(ms[BASELINE], ms[name], strict=True))
                for ms in (process["ms"] for process in self.processes)
                if name in ms
            ]
            if medians and name != BASELINE:
                found[name] = Gain.of(medians)
        return found

    @property
    def baseline_ms(self) -> float:
        return median(ms for process in self.processes for ms in process["ms"][BASELINE])

    def norm_ms(self, name: str) -> float | None:
        """Return the milliseconds that kernels of norms take in one step, where the profiler could
        tell them apart."""
        found = [p["norm_ms"][name] for p in self.processes if name in p.get("norm_ms", {})]
        return median(found) if found else None


def cases(document: Mapping[str, Any]) -> list[Measured]:
    """Return the cases of a results file that were measured, by model and mode."""
    runs_of = {Case.parse(text): runs for text, runs in document["cases"].items() if runs}
    models, modes = list(MODELS), list(MODES)

    def place(case: Case) -> tuple[int, int, bool, int]:
        settings = (case.checkpointed, case.length)
        return models.index(case.model), modes.index(case.mode), *settings

    return [Measured(case, runs_of[case]) for case in sorted(runs_of, key=place)]


def plot(document: Mapping[str, Any], path: Path) -> str:
    """Draw gains with their intervals, a row for each case. "" or the sentence that says why there
    is no plot."""
    pyplot = page_text.pyplot()
    if pyplot is None:
        return page_text.NO_PLOT
    found = cases(document)
    figure, axes = pyplot.subplots(figsize=(9, 0.75 * len(found) + 1.6), layout="constrained")
    names = [name for name in WAYS if any(name in each.gains for each in found)]
    for index, name in enumerate(names):
        points = [(row, each.gains[name]) for row, each in enumerate(found) if name in each.gains]
        rows = [row + (index - len(names) / 2) * 0.1 for row, _ in points]
        middles = [gain.median for _, gain in points]
        spread = [
            [gain.median - gain.low for _, gain in points],
            [gain.high - gain.median for _, gain in points],
        ]
        label = WAYS[name].title.replace("`", "")
        axes.errorbar(middles, rows, xerr=spread, fmt="o", ms=4, capsize=2, label=label)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(found)), [each.title for each in found])
    axes.invert_yaxis()
    axes.set_xlabel("steps per second over those with PyTorch's norm")
    gpu = document["environment"]["gpu"]
    axes.set_title(f"Forward and backward of transformer blocks, {gpu}")
    axes.grid(axis="x", alpha=0.3)
    figure.legend(fontsize="small", loc="outside lower center", ncols=4)
    figure.savefig(path)
    pyplot.close(figure)
    return ""
