"""Scores how well predictions rank what was measured, shape by shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import exp, log
from statistics import fmean

import numpy as np

from benchmarks.prediction.shapes import Shape
from generator.evaluate.predict.prior import TIE, Prior, agreement
from generator.kernels.strategies import launches
from generator.search.choose_winner import Preference

NEAR = 1.1
"""Spearman is also given among the trials within so many times the best."""


@dataclass(frozen=True)
class Score:
    """The scores of one shape: how well its trials were ranked, among those that may win.

    trials: how many were found in all; spearman, near: rank correlation, of all and of those within
    NEAR of the best; first, of_five: slowdown of the predicted best, and of the best of the first
    five; strategy, launches: whether the pick agrees with the winner; tied: whether its strategy
    has a trial within 1 % of the best.
    """

    shape: str
    trials: int
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
"""Chooses one of some places of a shape's trials by their predictions."""


def least(shape: Shape, places: list[int], predicted: list[float]) -> int:
    return min(places, key=lambda place: predicted[place])


def preferred(prior: Prior, shape: Shape, places: list[int], predicted: list[float]) -> int:
    """Choose as `generator.search.choose_winner.choose` does where times are predicted."""
    best = min(predicted[place] for place in places)
    votes = prior.votes(shape.problem, shape.target)
    preference = Preference(TIE, partial(agreement, votes))
    return min(places, key=lambda p: preference.key(shape.trials[p].config, predicted[p], best))


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
        trials=len(shape.trials),
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
    """Summarise the scores of all shapes: means, for slowdowns the geometric mean and the worst."""

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
