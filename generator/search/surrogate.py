"""Which of some untried configs is most promising, by the configs tried so far: LFBO.

A random forest learns to tell good configs from all others, where a good one weighs as much as it
is better than the limit. The odds that it gives to a config then grow with its expected
improvement (Song, Yu, Neiswanger and Ermon, "A General Recipe for Likelihood-free Bayesian
Optimization", 2022).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

TREES = 20
"""Each takes 0.6 ms of a proposal, and 50 found hardly more in the sweep of 4096x4096."""
GAMMA = 0.33
"""Fraction of the times that count as good, as in the authors' code."""
WORST = 1.5
"""Times beyond this many times the best count as that, and so do trials without one: how bad they
are says nothing about the best."""

FEWEST = 5
"""With fewer times than this, what other shapes say decides alone."""
SCALE = 0.05
"""The odds of a config fall by a factor of e for every such step that it is expected to be slower
than another one. In the replay 0.02 and 0.1 are nearly as good."""

Row = tuple[float, ...]
"""A config by the places of its values (`LegalConfigs.rank`), and what it is expected to take."""


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
    not known yet, which count as not good, so that their like is not tried over and over; expected:
    of the candidates, as `Experience.expect` has it, empty where there is no experience."""
    if not candidates:
        return None
    if len(expected) and np.isfinite(times).sum() < FEWEST:
        return int(np.argmin(expected))
    if np.isinf(min(times, default=np.inf)):
        return None
    from sklearn.ensemble import RandomForestClassifier  # here, because it loads for a second

    logs = np.log(np.minimum(times, WORST * min(times)))
    limit = np.quantile(np.unique(logs), GAMMA)
    good = logs < limit
    if not good.any():  # all are equal
        return int(np.argmin(expected)) if len(expected) else None
    gains = limit - logs[good]
    others = [*tried, *pending]
    rows = np.vstack([np.array(tried)[good], others])
    classes = np.repeat([1, 0], [len(gains), len(others)])
    # Half of the weight to each class.
    weights = np.concatenate([gains / gains.sum(), np.full(len(others), 1 / len(others))])
    forest = RandomForestClassifier(TREES, random_state=0).fit(rows, classes, weights)
    good_ones = forest.predict_proba(candidates)[:, 1]
    if not len(expected):
        return int(np.argmax(good_ones))
    known = np.clip(good_ones, 0.01, 0.99)
    return int(np.argmax(np.log(known / (1 - known)) - np.asarray(expected) / SCALE))
