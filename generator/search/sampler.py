"""The Optuna sampler of a search: random legal configs, then those that a surrogate prefers."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import islice
from math import inf
from operator import itemgetter
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from generator.kernels.geometry import Config
from generator.search.experience import Experience
from generator.search.surrogate import Row, most_promising
from generator.space.family import family_of
from generator.space.legal_configs import Key, LegalConfigs, Values
from generator.space.space import Space

FIRST = 20
"""Configs that a study takes, seeds among them, before the surrogate is asked. A predicted search
ends before that, unless --trials is raised (TRIALS in budget.py)."""
DRAWN = 50
"""Random legal configs that are candidates at every turn, beside the neighbours."""
STEP = (8, 2, 2, 2, 2)
"""Neighbours of the best, second best, ... that become candidates at every turn: finding all of
them at once takes longer than a trial."""

FAMILY_SHARE = 0.2
"""The share of all trials so far up to which the surrogate may choose one more of the same family;
twice the average share where there are so few families that this is more. Without a limit, two
thirds of a search of 65536x8192 went into one family, and some of the best were never tried."""
FEWEST_OF_FAMILY = 10
"""The number of trials that a family may have in any case."""


def distributions(space: Space) -> dict[str, BaseDistribution]:
    """One categorical parameter per knob. Its choices follow from the space alone, because Optuna
    fixes them per name for the life of a study."""
    return {knob.name: CategoricalDistribution(knob.choices) for knob in space.knobs}


def uncrowded(candidates: list[Values], trials: Sequence[Config]) -> list[Values]:
    """The candidates of families that may have more trials; all where there are none of these."""
    count = Counter(map(family_of, trials))
    families = [family_of(config) for config in candidates]
    share = max(FAMILY_SHARE, 2 / max(1, len({*count, *families})))
    limit = max(FEWEST_OF_FAMILY, share * len(trials))
    kept = [c for c, f in zip(candidates, families, strict=True) if count[f] < limit]
    return kept or candidates


class NothingLeftError(Exception):
    """Every config that the sampler may propose is taken."""


class LegalSampler(BaseSampler):
    """Proposes legal configs of a deterministic class, none of them twice.

    `planned` holds configs that go first, as they are. Then proposals are random until FIRST are
    taken, unless there is experience with other shapes, and from then on the most promising of the
    candidates: the neighbours of the best trials, and random configs.
    `taken` grows with every proposal; a resumed study puts its finished configs there.

    Trials come from `study.ask(distributions(space))`; raises NothingLeftError out of it when no
    config is left. A trial that may not win violates a constraint, and one without a time is
    pruned.
    """

    def __init__(
        self, legal: LegalConfigs, seed: int, experience: Experience | None = None
    ) -> None:
        self.legal, self.experience = legal, experience
        self.taken: set[Key] = set()
        self.planned: deque[Config] = deque()
        self._rng = random.Random(seed)
        self._neighbours: dict[Key, Values] = {}
        self._walks: dict[Key, Iterator[Values]] = {}
        self._known_rows: dict[Key, Row] = {}

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
        raise ValueError(f"'{param_name}' is no knob of {self.legal.space.path.name}")

    def _propose(self, study: Study, trial: FrozenTrial) -> Config:
        ready = self.experience is not None or len(self.taken) >= FIRST
        return (self._most_promising(study) if ready else None) or self._draw()

    def _draw(self) -> Values:
        drawn = self.legal.draw(self._rng, self.taken)
        if drawn is None:
            raise NothingLeftError
        return drawn

    def _most_promising(self, study: Study) -> Values | None:
        key = self.legal.key
        tried = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
        under_way = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        drawn = {key(config): config for config in self._random()}
        self._neighbours |= {key(config): config for config in self._more_neighbours(tried)}
        candidates = [
            config for k, config in (drawn | self._neighbours).items() if k not in self.taken
        ]
        # The trial that asks has the knobs of one value already, and no others.
        pending = [t.params for t in under_way if len(t.params) == len(self.legal.space.knobs)]
        candidates = uncrowded(candidates, [*(trial.params for trial in tried), *pending])
        rows = self._rows(candidates)
        place = most_promising(
            self._rows([trial.params for trial in tried]),
            [inf if trial.value is None else trial.value for trial in tried],
            self._rows(pending),
            rows,
            [] if self.experience is None else [row[-1] for row in rows],
        )
        return None if place is None else candidates[place]

    def _rows(self, configs: Sequence[Config]) -> list[Row]:
        """Return the surrogate's rows of configs: the places of the values and, with experience,
        the window and what is expected. Without experience the window misleads: in the replay of
        4096x4096, four of 16 searches stayed 1 to 2 % behind the optimum, and without the window
        none of 12."""
        rank, known = self.legal.rank, self._known_rows
        if self.experience is None:
            return [rank(config) for config in configs]
        keys = [self.legal.key(config) for config in configs]
        new = {k: c for k, c in zip(keys, configs, strict=True) if k not in known}
        for config, expected in zip(
            new.values(), self.experience.expect([*new.values()]), strict=True
        ):
            window = self.legal.window(config)
            known[self.legal.key(config)] = (*rank(config), window, expected)
        return [known[key] for key in keys]

    def _random(self) -> Iterator[Values]:
        for _ in range(DRAWN):
            drawn = self.legal.draw(self._rng, ())
            if drawn is not None:
                yield drawn

    def _more_neighbours(self, tried: Sequence[FrozenTrial]) -> Iterator[Values]:
        feasible = [
            (trial.value, self.legal.rank(trial.params), trial.params)
            for trial in tried
            if trial.value is not None and max(trial.constraints.values(), default=0) <= 0
        ]
        best = sorted(feasible, key=itemgetter(0, 1))
        for (_, _, config), step in zip(best, STEP, strict=False):
            key = self.legal.key(config)
            walk = self._walks.setdefault(key, self.legal.around(config, self._rng))
            yield from islice(walk, step)
