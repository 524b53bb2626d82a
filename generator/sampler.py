"""The Optuna sampler of a study: proposals of TPE, made legal and new."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from generator.legal import Key, LegalConfigs, Values
from generator.space import Space
from generator.variant import Config


def distributions(space: Space) -> dict[str, BaseDistribution]:
    """One categorical parameter per knob. Its choices depend on the space alone, because Optuna
    fixes them per name for the life of a study."""
    return {knob.name: CategoricalDistribution(knob.choices) for knob in space.knobs}


class NothingLeft(Exception):
    """Every config that the sampler may propose has been tried."""


class LegalSampler(BaseSampler):
    """Proposes deterministic legal configs that were never proposed before.

    Configs in `planned` go first, as they are. Then TPE proposes, and a proposal that is illegal,
    known or not deterministic is replaced by the nearest one that will do, or by a random one where
    the way is long. While the study has fewer than TPE's ten startup trials, proposals are random.
    Every knob of the space has to be in the study's trials, so a study uses `distributions(space)`.

    TPE is multivariate: <NUMBERS>
    """

    def __init__(self, legal: LegalConfigs, seed: int, multivariate=True, startup=10, liar=True) -> None:
        self.legal = legal
        self.taken: set[Key] = set()
        self.planned: deque[Config] = deque()
        self._rng = random.Random(seed)
        self._tpe = TPESampler(seed=seed, multivariate=multivariate, n_startup_trials=startup, constant_liar=liar)

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return distributions(self.legal.space)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        config = self.planned.popleft() if self.planned else self._propose(study, trial)
        self.taken.add(self.legal.key(config))
        return dict(config)

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        raise RuntimeError(f"{param_name} is no knob of {self.legal.space.path.name}")

    def reseed_rng(self) -> None:
        self._rng.seed()
        self._tpe.reseed_rng()

    def _propose(self, study: Study, trial: FrozenTrial) -> Values:
        known = self._tpe.infer_relative_search_space(study, trial)
        if known:
          proposal = self._tpe.sample_relative(study, trial, known)
        else:
          proposal={}
          S=distributions(self.legal.space)
          if len(study.get_trials(deepcopy=False,states=(1,3)))>=10 or 1:
            from optuna.trial import TrialState
            n=len(study.get_trials(deepcopy=False,states=(TrialState.COMPLETE,TrialState.PRUNED)))
            if n>=self._tpe._n_startup_trials:
              for k,d in S.items():
                proposal[k]=self._tpe.sample_independent(study,trial,k,d)
        config = None
        if proposal:
            config = self.legal.nearest(
                proposal, self._rng, taken=self.taken, deterministic=True
            )
        if config is None:
            config = self.legal.random(self._rng, self.taken, deterministic=True)
        if config is None:
            raise NothingLeft
        return config
