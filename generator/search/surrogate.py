"""Chooses the most promising of some untried configs, by the configs tried so far.

A random forest learns to tell good configs from all others, where a good one weighs as much as it
is better than the limit. The odds that it gives to a config then grow with its expected
improvement (LFBO: Song, Yu, Neiswanger and Ermon, "A General Recipe for Likelihood-free Bayesian
Optimization", 2022). They are multiplied by what other shapes say. Without other shapes, their
square root is multiplied by the expected improvement that a second forest predicts from the times
(SMAC: Hutter, Hoos and Leyton-Brown, "Sequential Model-Based Optimization for General Algorithm
Configuration", 2011). In the replay that finds slightly more on average than either part alone or
their product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

TREES = 20
"""The trees of a forest. Each takes 0.6 ms of a proposal, and 50 found hardly more in the sweep of
4096x4096."""
GAMMA = 0.33
"""Fraction of the times that count as good, as in the authors' code."""
WORST = 1.5
"""Times beyond this many times the best count as that, and so do trials without one: how bad they
are says nothing about the best."""

FEWEST_TIMES = 5
"""The fewest times that are learned from; with fewer, what other shapes say decides alone."""
SCALE = 0.05
"""The odds of a config fall by a factor of e for every such step that it is expected to be slower
than another one. In the replay 0.02 and 0.1 are nearly as good."""

Row = tuple[float, ...]
"""A config by the places of its values (`LegalConfigs.rank`) and, with experience, its window
(`LegalConfigs.window`) and what it is expected to take."""
Vector = NDArray[np.float64]


def most_promising(
    tried: Sequence[Row],
    times: Sequence[float],
    pending: Sequence[Row],
    candidates: Sequence[Row],
    expected: Sequence[float] = (),
) -> int | None:
    """The place of the most promising candidate, the first of equals; None where nothing is known
    that would tell them apart.

    times: of `tried` in one unit, infinite where there is none; pending: configs whose times are
    not known yet; expected: of the candidates, as `Experience.expect` has it, empty where there is
    no experience."""
    if not candidates:
        return None
    if len(expected) and np.isfinite(times).sum() < FEWEST_TIMES:
        return int(np.argmin(expected))
    logs = bounded_logs(times)
    if not (leads(logs) > 0).any():
        return int(np.argmin(expected)) if len(expected) else None
    odds = log_odds(tried, logs, pending, candidates)
    if len(expected):
        return int(np.argmax(odds - np.asarray(expected) / SCALE))
    improvements = expected_improvement(tried, logs, pending, candidates)
    return int(np.argmax(odds / 2 + np.log(improvements)))


def bounded_logs(times: Sequence[float]) -> Vector:
    """Logarithms of times, none of them above that of WORST times the best; all 0 where none is
    finite."""
    best = min(times, default=np.inf)
    if np.isinf(best):
        return np.zeros(len(times))
    logs: Vector = np.log(np.minimum(times, WORST * best))
    return logs


def leads(logs: Vector) -> Vector:
    """Return by how much each time is better than the limit of good ones; above 0 for none where
    all are equal, or differ by rounding alone."""
    if not len(logs):
        return logs
    found: Vector = np.quantile(np.unique(logs), GAMMA) - logs
    return found


def log_odds(
    tried: Sequence[Row], logs: Vector, pending: Sequence[Row], candidates: Sequence[Row]
) -> Vector:
    """Return the log odds that each candidate is good, by a forest that classifies. What is pending
    counts as not good, so that its like is not tried over and over. One of the `leads` has to be
    above 0."""
    from sklearn.ensemble import RandomForestClassifier  # here, because it loads for a second

    ahead = leads(logs)
    good = ahead > 0
    gains = ahead[good]
    others = [*tried, *pending]
    rows = np.vstack([np.array(tried)[good], others])
    classes = np.repeat([1, 0], [len(gains), len(others)])
    # Half of the weight to each class.
    weights = np.concatenate([gains / gains.sum(), np.full(len(others), 1 / len(others))])
    forest = RandomForestClassifier(TREES, random_state=0).fit(rows, classes, weights)
    good_ones = np.clip(forest.predict_proba(candidates)[:, 1], 0.01, 0.99)
    odds: Vector = np.log(good_ones / (1 - good_ones))
    return odds


def expected_improvement(
    tried: Sequence[Row], logs: Vector, pending: Sequence[Row], candidates: Sequence[Row]
) -> Vector:
    """Return the expected improvement of each candidate over the best, in log ratio and at least
    1e-12, by a forest that predicts times. What is pending counts as being as fast as predicted."""
    from sklearn.ensemble import RandomForestRegressor

    rows = np.array(tried)
    forest = RandomForestRegressor(TREES, max_features=5 / 6, random_state=0).fit(rows, logs)
    if pending:
        logs = np.append(logs, forest.predict(pending))
        forest.fit(np.vstack([rows, pending]), logs)
    found = np.array([tree.predict(candidates) for tree in forest.estimators_])
    spreads = np.maximum(found.std(axis=0), 1e-5)
    return np.maximum(improvement(logs.min() - found.mean(axis=0), spreads), 1e-12)


def improvement(gains: Vector, spreads: Vector) -> Vector:
    """Expected improvement where normally distributed gains have these means and deviations."""
    z = gains / spreads
    below = 0.5 * (1 + np.array([math.erf(value) for value in z / math.sqrt(2)]))
    density = np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    found: Vector = gains * below + spreads * density
    return found
