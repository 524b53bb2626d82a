#!/usr/bin/env python3
"""How well predictions rank what was measured, shape by shape.

    python -m benchmarks.prediction_score --out benchmarks/results/prediction_h200.json

Needs no GPU: it predicts every timed trial of the committed studies from its config and what its
compilation gave. docs/prediction.md explains the columns.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import exp, log
from pathlib import Path
from statistics import fmean, median

import numpy as np

from benchmarks.results import write_json
from generator.errors import NormforgeError
from generator.evaluate.predict.evaluator import predict_us
from generator.kernels.geometry import Config
from generator.kernels.ptxas import Resources
from generator.kernels.strategies import launches
from generator.kernels.variant import Variant, make_variant
from generator.paths import GENERATED
from generator.problem import Problem
from generator.studies.reader import Study, read_studies
from generator.studies.records import Record
from generator.target import Target, find_target

NEAR = 1.1
"""Spearman is also given among the trials within so many times the best."""


@dataclass(frozen=True)
class Trial:
    """A timed trial. log_ratio: the logarithm of its time over the floor, where the floor is the
    median of those that the same GPU measured in the study: a trial's own scatters by several
    percent where kernels are short."""

    variant: Variant
    resources: Resources
    log_ratio: float
    feasible: bool

    @property
    def config(self) -> Config:
        return self.variant.config


@dataclass(frozen=True)
class Shape:
    """What was measured of one problem. won: the config of its winner."""

    problem: Problem
    target: Target
    trials: tuple[Trial, ...]
    won: Config

    @cached_property
    def feasible(self) -> list[int]:
        """Places of the trials that may win."""
        return [place for place, trial in enumerate(self.trials) if trial.feasible]


def read_shapes(folders: Sequence[Path]) -> list[Shape]:
    """The measured studies with a winner in some folders."""
    studies = [study for folder in folders for study in read_studies(folder)]
    return [_shape(s) for s in studies if s.evidence == "measured" and s.winner is not None]


def _shape(study: Study) -> Shape:
    timed = [r for r in study.timed if r.result.us and r.registers is not None]
    floors: dict[str, list[float]] = defaultdict(list)
    for record in timed:
        floors[record.result.gpu].append(record.result.floor_us or 0.0)
    by_gpu = {gpu: median(times) for gpu, times in floors.items()}
    trials = [_trial(study.problem, record, by_gpu[record.result.gpu]) for record in timed]
    assert study.winner is not None
    return Shape(study.problem, find_target(study.gpu), tuple(trials), study.winner.config)


def _trial(problem: Problem, record: Record, floor: float) -> Trial:
    variant = make_variant(record.config, problem)
    assert record.registers is not None
    assert record.smem is not None
    assert record.result.us is not None
    static = record.smem - variant.smem_bytes
    resources = Resources(record.registers, 0, 0, static)
    return Trial(variant, resources, log(record.result.us / floor), record.feasible)


@dataclass(frozen=True)
class Score:
    """How well one shape's trials were ranked, among those that may win.

    spearman, near: rank correlation, of all and of those within NEAR of the best; first, of_five:
    how much slower the trial with the least predicted time, and the best of five, is than the
    fastest; strategy, launches: whether the pick has those of the measured winner; tied: whether
    the pick's strategy has a trial within 1 % of the fastest.
    """

    shape: str
    pick: str
    won: str
    spearman: float
    near: float
    first: float
    of_five: float
    strategy: bool
    launches: bool
    tied: bool


Pick = Callable[[Shape, list[int], list[float]], int]
"""Which of some places of a shape's trials is chosen by their predictions."""


def least(shape: Shape, places: list[int], predicted: list[float]) -> int:
    return min(places, key=lambda place: predicted[place])


def score(shape: Shape, predicted: list[float], pick: Pick = least) -> Score:
    """The score of some predictions, one for each trial of the shape."""
    places = shape.feasible
    times = {place: shape.trials[place].log_ratio for place in places}
    fastest = min(times.values())
    near = [place for place in places if times[place] <= fastest + log(NEAR)]
    chosen = pick(shape, places, predicted)
    five = [chosen, *sorted(places, key=lambda place: predicted[place])]
    config = shape.trials[chosen].config
    alike = [p for p in places if shape.trials[p].config["strategy"] == config["strategy"]]
    return Score(
        shape=str(shape.problem),
        pick=str(config["strategy"]),
        won=str(shape.won["strategy"]),
        spearman=round(_spearman(places, times, predicted), 3),
        near=round(_spearman(near, times, predicted), 3),
        first=round(exp(times[chosen] - fastest) - 1, 4),
        of_five=round(exp(min(times[p] for p in list(dict.fromkeys(five))[:5]) - fastest) - 1, 4),
        strategy=config["strategy"] == shape.won["strategy"],
        launches=launches(config) == launches(shape.won),
        tied=min(times[place] for place in alike) <= fastest + log(1.01),
    )


def _spearman(places: list[int], times: dict[int, float], predicted: list[float]) -> float:
    if len(places) < 3:
        return 0.0
    one, other = (
        _ranks(np.array([values[place] for place in places])) for values in (times, predicted)
    )
    return float(np.corrcoef(one, other)[0, 1]) if one.std() and other.std() else 0.0


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks, equal values with the mean of theirs."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    means: np.ndarray = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return means


def summary(scores: Sequence[Score]) -> dict[str, float]:
    """Over all shapes: means, for slowdowns the geometric mean and the worst."""

    def typical(values: list[float]) -> float:
        return round(exp(fmean(log(1 + value) for value in values)) - 1, 4)

    return {
        "shapes": len(scores),
        "spearman": round(fmean(s.spearman for s in scores), 3),
        "spearman_near": round(fmean(s.near for s in scores), 3),
        "first": typical([s.first for s in scores]),
        "first_worst": max(s.first for s in scores),
        "of_five": typical([s.of_five for s in scores]),
        "strategy": round(fmean(s.strategy for s in scores), 3),
        "strategy_tied": round(fmean(s.tied for s in scores), 3),
        "launches": round(fmean(s.launches for s in scores), 3),
    }


def physical(shape: Shape) -> list[float]:
    """Predicted µs of every trial by the physical terms alone."""
    return [
        predict_us(t.variant, t.resources, shape.problem, shape.target).us for t in shape.trials
    ]


def table(summaries: dict[str, dict[str, float]]) -> str:
    """One row for each model."""
    lines = [
        f"{'model':28}{'Spearman':>9}{'near':>7}{'first':>8}{'worst':>8}{'of 5':>8}"
        f"{'strategy':>10}{'or tied':>9}{'launches':>10}"
    ]
    for name, s in summaries.items():
        lines.append(
            f"{name:28}{s['spearman']:>9.2f}{s['spearman_near']:>7.2f}{s['first']:>8.1%}"
            f"{s['first_worst']:>8.1%}{s['of_five']:>8.1%}{s['strategy']:>10.0%}"
            f"{s['strategy_tied']:>9.0%}{s['launches']:>10.0%}"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--studies",
        type=Path,
        action="append",
        help="a folder with measured studies, any number of times (default: generated/h200)",
    )
    parser.add_argument("--out", type=Path, help="the results file, .json")
    args = parser.parse_args(argv)
    shapes = read_shapes(args.studies or [GENERATED / "h200"])
    scores = {"physical": [score(shape, physical(shape)) for shape in shapes]}
    summaries = {name: summary(found) for name, found in scores.items()}
    print(f"{len(shapes)} shapes, {sum(len(s.trials) for s in shapes)} timed trials")
    print(table(summaries))
    if args.out is not None:
        detail = {name: [asdict(s) for s in found] for name, found in scores.items()}
        write_json(args.out, {"summaries": summaries, "shapes": detail})
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except NormforgeError as error:
        print(f"prediction_score: {error}", file=sys.stderr)
        sys.exit(2)
