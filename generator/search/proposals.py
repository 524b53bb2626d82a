"""What a search tries next, as long as there is budget for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, groupby, islice
from operator import attrgetter

from generator.kernels.geometry import Config
from generator.kernels.strategies import REDUCTION_KNOBS, determinism_class
from generator.search.surrogate import Surrogate
from generator.space.legal_configs import Key, LegalConfigs, Values
from generator.studies.records import Record

FIRST = 12
"""Trials, seeds among them, before the surrogate is asked; the others are drawn at random."""
TPE_EVERY = 4
"""One proposal in so many is TPE's, because the surrogate's stay near what is known to be good. In
the sweep of an H200 (benchmarks/search_replay) 94 % of 200 searches were within 2 % of the optimum
after 50 trials and all after 100; with TPE for 80 trials, then neighbours of the best in any order,
67 % and 93 % of 30."""
_STEP = (8, 2, 2, 2, 2)
"""Neighbours of the best, second best, ... that become candidates at every turn: finding all of
them at once takes longer than a trial."""
_DRAWN = 200
"""Random legal configs that are candidates all along, in a search of 50 trials or more."""
_DRAWN_FOR_EACH = 4
"""Of a shorter search for each trial: drawing them takes longer than a predicted trial."""
OVERHEAD_SHARE = 0.05
"""Share of the budget for reduction kinds that are not deterministic, beside their seeds."""
_MAX_OVERHEAD_SHARE = 0.1  # of a budget that is small for one trial of each such kind


@dataclass
class Proposals:
    """The order of a search. `starts` are configs known to be good elsewhere, most promising first;
    `records`, `taken` and `used` (fraction of the budget) are those of the running search and are
    read whenever the next config is asked for."""

    legal: LegalConfigs
    rng: random.Random
    starts: Sequence[Config]
    records: Sequence[Record]
    taken: Collection[Key]
    used: Callable[[], float]
    trials: int | None
    sweep_limit: int
    _walks: dict[Key, Iterator[Values]] = field(default_factory=dict)
    _candidates: dict[Key, Values] = field(default_factory=dict)
    _drawn: bool = False

    @cached_property
    def _surrogate(self) -> Surrogate:
        return Surrogate(self.legal.space)

    def plan(self) -> Iterator[tuple[str, Values | None]]:
        """Endless pairs of origin and config, or of "tpe" and None where the sampler is to choose;
        ends only when a space that is small enough has been swept.

        Raises NormforgeError when no config is legal."""
        limit = min(self.sweep_limit, self.trials or self.sweep_limit)
        first = self.legal.first(limit + 1)
        if not first:
            # Raises, with the rule that stands in the way.
            self.legal.space.sample(self.legal.problem, self.legal.target, self.rng)
        if len(first) <= limit:
            yield from (("sweep", config) for config in first if self._new(config))
            return
        yield from (("seed", config) for config in self._seeds() if self._new(config))
        overhead_from = 1 - self._overhead_share()
        for turn in count(1):
            if self.used() >= overhead_from:
                break
            asks_surrogate = len(self.taken) >= FIRST and turn % TPE_EVERY
            promising = self._most_promising() if asks_surrogate else None
            yield ("tpe", None) if promising is None else ("surrogate", promising)
        yield from (("overhead", config) for config in self._ineligible_variants())
        while True:
            yield "tpe", None

    def _new(self, config: Config) -> bool:
        return self.legal.key(config) not in self.taken

    def _seeds(self) -> Iterator[Values]:
        """The starts, then the reduction kinds without a trial, in the shape of the best config."""
        adapted = [self.legal.adapt(config, self.rng) for config in self.starts]
        starts = [config for config in adapted if config is not None]
        yield from starts
        tried = {_reduction_kind(record.config) for record in self.records}
        for kind in sorted(self.legal.reduction_kinds, key=_ineligible):
            if _reduction_kind(kind) in tried:
                continue
            known = [*self._ranked(), *starts]
            seed = self._with_kind(known[0], kind) if known else None
            yield seed or kind

    def _most_promising(self) -> Values | None:
        """The most promising of the neighbours of the best and of some random configs."""
        for config, step in zip(self._ranked(), _STEP, strict=False):
            key = self.legal.key(config)
            if key not in self._walks:
                self._walks[key] = self.legal.around(config, self.rng)
            for near in islice(self._walks[key], step):
                self._candidates[self.legal.key(near)] = near
        if not self._drawn:
            self._drawn = True
            for _ in range(min(_DRAWN, _DRAWN_FOR_EACH * (self.trials or _DRAWN))):
                drawn = self.legal.draw(self.rng, (), deterministic=True)
                if drawn is not None:
                    self._candidates[self.legal.key(drawn)] = drawn
        for key in self._candidates.keys() & self.taken:
            del self._candidates[key]
        tried = [self.legal.key(record.config) for record in self.records]
        pending = sorted(set(self.taken).difference(tried), key=repr)
        best = self._surrogate.best(self.records, tried, pending, list(self._candidates))
        return None if best is None else self._candidates[best]

    def _ineligible_variants(self) -> Iterator[Values]:
        """The best configs, each with every reduction kind that may not win."""
        for config in self._ranked():
            for kind in filter(_ineligible, self.legal.reduction_kinds):
                variant = self._with_kind(config, kind, self.taken)
                if variant is not None:
                    yield variant

    def _overhead_share(self) -> float:
        kinds = sum(map(_ineligible, self.legal.reduction_kinds))
        if not kinds:
            return 0.0
        each = kinds / self.trials if self.trials else 0.0
        return min(_MAX_OVERHEAD_SHARE, max(OVERHEAD_SHARE, each))

    def _with_kind(
        self, config: Config, kind: Config, taken: Collection[Key] = ()
    ) -> Values | None:
        """The legal config nearest to `config` that reduces dw as `kind` does."""
        swapped = {**config, **{name: kind[name] for name in REDUCTION_KNOBS}}
        return self.legal.nearest(swapped, self.rng, held=REDUCTION_KNOBS, taken=taken)

    def _ranked(self) -> Iterator[Config]:
        """Configs that may win, best first."""
        feasible = [record for record in self.records if record.feasible]
        by_ratio = sorted(feasible, key=attrgetter("ratio"))
        for _, equals in groupby(by_ratio, key=attrgetter("ratio")):
            yield from sorted((record.config for record in equals), key=self.legal.rank)


def _reduction_kind(config: Config) -> tuple[int | str, ...]:
    return tuple(config[name] for name in REDUCTION_KNOBS)


def _ineligible(config: Config) -> bool:
    """Whether the config cannot win and is measured only for the overhead of determinism."""
    return determinism_class(config) == "none"
