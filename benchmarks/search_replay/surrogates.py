"""Other surrogates in the place of the tuner's Gaussian process: random forests, from scikit-learn.

Each has the `best` of generator/search/surrogate.py and sees the same times and candidates. In the
sweep of the H200 a proposal takes ExpectedImprovement 59 ms of one core, LikelihoodFree 36 ms, and
the Gaussian process 1.2 ms (medians).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from generator.search.surrogate import FEWEST, WORST, Floats, _improvement
from generator.space.legal_configs import Key
from generator.space.space import Space
from generator.studies.records import Record

TREES = 50
"""SMAC has 10, the authors of LFBO 1000: time for each proposal grows with them."""
GAMMA = 0.33
"""Fraction of the times that LFBO's classifier counts as good, as in its authors' code."""


class ForestSurrogate(ABC):
    """A knob of numbers is one feature; one with a name among its values has a feature for each."""

    def __init__(self, space: Space, seed: int) -> None:
        self._choices = [knob.choices for knob in space.knobs]
        self._seed = seed

    def best(
        self,
        records: Sequence[Record],
        tried: Sequence[Key],
        pending: Sequence[Key],
        candidates: Sequence[Key],
    ) -> Key | None:
        """As Surrogate.best."""
        timed = [record.ratio for record in records if record.result.ratio is not None]
        if len(timed) < FEWEST or not candidates:
            return None
        worst = math.log(min(timed)) + WORST
        times = [min(math.log(r.ratio), worst) if r.result.ratio else worst for r in records]
        known, waiting, asked = map(self._features, (tried, pending, candidates))
        return candidates[int(np.argmax(self._scores(known, np.array(times), waiting, asked)))]

    @abstractmethod
    def _scores(self, known: Floats, times: Floats, waiting: Floats, asked: Floats) -> Floats:
        """How promising the configs of `asked` are, after `times` of the known ones."""

    def _features(self, keys: Sequence[Key]) -> Floats:
        columns: list[list[float]] = []
        for place, choices in enumerate(self._choices):
            values = [key[place] for key in keys]
            if all(isinstance(choice, int) for choice in choices):
                columns.append([float(value) for value in values])
            else:
                columns += [[float(value == choice) for value in values] for choice in choices]
        return np.array(columns).T


class ExpectedImprovement(ForestSurrogate):
    """Expected improvement from the mean and the spread over the trees, as in SMAC (Hutter, Hoos
    and Leyton-Brown, 2011). What is pending counts as being as fast as expected."""

    def _scores(self, known: Floats, times: Floats, waiting: Floats, asked: Floats) -> Floats:
        from sklearn.ensemble import RandomForestRegressor

        forest = RandomForestRegressor(TREES, max_features=5 / 6, random_state=self._seed)
        forest.fit(known, times)
        if len(waiting):
            known, times = np.vstack([known, waiting]), np.append(times, forest.predict(waiting))
            forest.fit(known, times)
        found = np.array([tree.predict(asked) for tree in forest.estimators_])
        return _improvement(times.min() - found.mean(axis=0), np.maximum(found.std(axis=0), 1e-5))


class LikelihoodFree(ForestSurrogate):
    """The odds that a classifier gives to "better than the GAMMA quantile", where each better
    config weighs as much as it is better (Song et al., "A General Recipe for Likelihood-free
    Bayesian Optimization", 2022). What is pending counts as not better."""

    def _scores(self, known: Floats, times: Floats, waiting: Floats, asked: Floats) -> Floats:
        from sklearn.ensemble import RandomForestClassifier

        limit = np.quantile(np.unique(times), GAMMA)
        good = times < limit
        others = np.vstack([known, waiting]) if len(waiting) else known
        if not good.any():  # all are equal
            return np.zeros(len(asked))
        gains = limit - times[good]
        weights = np.concatenate(
            [gains / gains.sum(), np.full(len(others), 1 / len(others))]  # half for each class
        )
        forest = RandomForestClassifier(TREES, random_state=self._seed)
        classes = np.repeat([1, 0], [good.sum(), len(others)])
        forest.fit(np.vstack([known[good], others]), classes, weights)
        odds: Floats = forest.predict_proba(asked)[:, 1]
        return odds
