"""What the search is compared with: Optuna's samplers, and another use of a random forest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from generator.kernels.geometry import Config
from generator.search.sampler import LegalSampler
from generator.search.surrogate import TREES, WORST, Row
from generator.space.legal_configs import LegalConfigs


class RepairingSampler(LegalSampler):
    """What another sampler proposes. A proposal that is illegal, taken or not deterministic gives
    way to the nearest config that will do, or to a random one where that is far away."""

    def __init__(self, legal: LegalConfigs, seed: int, proposer: BaseSampler) -> None:
        super().__init__(legal, seed)
        self._proposer = proposer

    def _propose(self, study: Study, trial: FrozenTrial) -> Config:
        searched = self._proposer.infer_relative_search_space(study, trial)
        wanted: dict[str, Any] = self._proposer.sample_relative(study, trial, searched)
        near = None
        if wanted:
            near = self.legal.nearest(wanted, self._rng, taken=self.taken, deterministic=True)
        return near or self._draw()


def most_improvement_expected(
    tried: Sequence[Row],
    times: Sequence[float],
    pending: Sequence[Row],
    candidates: Sequence[Row],
    expected: Sequence[float],
) -> int | None:
    """As `generator.search.surrogate.most_promising`, by the expected improvement that follows from
    the mean and the spread over the trees of a regression forest, as in SMAC (Hutter, Hoos and
    Leyton-Brown, 2011). What is pending counts as being as fast as expected."""
    if not candidates or np.isinf(min(times, default=np.inf)):
        return None
    from sklearn.ensemble import RandomForestRegressor

    rows, logs = np.array(tried), np.log(np.minimum(times, WORST * min(times)))
    forest = RandomForestRegressor(TREES, max_features=5 / 6, random_state=0).fit(rows, logs)
    if pending:
        logs = np.append(logs, forest.predict(pending))
        rows = np.vstack([rows, pending])
        forest.fit(rows, logs)
    found = np.array([tree.predict(candidates) for tree in forest.estimators_])
    spreads = np.maximum(found.std(axis=0), 1e-5)
    return int(np.argmax(improvement(logs.min() - found.mean(axis=0), spreads)))


def improvement(gains: NDArray[np.float64], spreads: NDArray[np.float64]) -> NDArray[np.float64]:
    """Expected improvement, in log ratio, where `gains` are expected."""
    z = gains / spreads
    below = 0.5 * (1 + np.array([math.erf(value) for value in z / math.sqrt(2)]))
    density = np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    improvement: NDArray[np.float64] = gains * below + spreads * density
    return improvement
