"""The rivals of the search: Optuna's samplers, and parts of its own surrogate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from generator.kernels.geometry import Config
from generator.search.sampler import LegalSampler
from generator.search.surrogate import Row, Vector, bounded_logs, leads
from generator.space.legal_configs import LegalConfigs


class RepairingSampler(LegalSampler):
    """Repairs the proposals of another sampler. A proposal that is illegal, taken or not
    deterministic gives way to the nearest config that will do, or to a random one where that is far
    away."""

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


def best_by(
    score: Callable[..., Vector],
    tried: Sequence[Row],
    times: Sequence[float],
    pending: Sequence[Row],
    candidates: Sequence[Row],
    expected: Sequence[float],
) -> int | None:
    """Choose as `generator.search.surrogate.most_promising` does, by one part of it alone:
    `log_odds` or `expected_improvement`."""
    logs = bounded_logs(times)
    if not candidates or not (leads(logs) > 0).any():
        return None
    return int(np.argmax(score(tried, logs, pending, candidates)))
