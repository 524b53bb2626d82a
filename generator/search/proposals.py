"""Proposes what a search tries next, as long as there is budget for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from generator.kernels.geometry import Config
from generator.kernels.strategies import REDUCTION_KNOBS, is_deterministic, strategy_of
from generator.search.neighbours import CARRIED, CARRIED_SHARE, carried_over
from generator.space.legal_configs import Key, LegalConfigs, Values
from generator.studies.records import Record, Winner, fastest_first

OVERHEAD_SHARE = 0.05
"""Share of the budget for reduction kinds that are not deterministic, beside their seeds."""
BASES = 3
"""Configs that are tried with every value that was added to the space since the last search."""
_DRAWS = 100  # drawn where no known config can have such a value
_MAX_OVERHEAD_SHARE = 0.1  # for budgets too small for one trial of each kind


@dataclass
class Proposals:
    """The order of a search. `starts` are configs known to be good elsewhere, most promising first;
    `records`, `taken` and `used` (fraction of the budget) are those of the running search and are
    read whenever the next config is asked for. `added` are knobs with values that earlier trials
    could not have; `winners` are those of all shapes that are known by now; those of neighbours
    are tried before the end."""

    legal: LegalConfigs
    rng: random.Random
    starts: Sequence[Config]
    records: Sequence[Record]
    taken: Collection[Key]
    used: Callable[[], float]
    trials: int
    sweep_limit: int
    added: Sequence[tuple[str, int | str]] = ()
    winners: Callable[[], Sequence[Winner]] = tuple

    def plan(self) -> Iterator[tuple[str, Values | None]]:
        """Endless pairs of origin and config, or of "search" and None where the sampler is to
        choose; ends only when a space that is small enough has been swept.

        Raises NormforgeError when no config is legal."""
        limit = min(self.sweep_limit, self.trials)
        first = self.legal.first(limit + 1)
        if not first:
            # Raises, with the rule that stands in the way.
            self.legal.space.sample(self.legal.problem, self.legal.target, self.rng)
        if len(first) <= limit:
            yield from (("sweep", config) for config in first if self._new(config))
            return
        yield from (("seed", config) for config in self._with_added_values())
        yield from (("seed", config) for config in self._seeds() if self._new(config))
        overhead_from = 1 - self._overhead_share()
        yield from self._searched(overhead_from - len(self._carried_over()) / self.trials)
        # Others may have finished neighbours meanwhile.
        yield from (("neighbour", config) for config in self._carried_over())
        yield from self._searched(overhead_from)
        yield from (("overhead", config) for config in self._ineligible_variants())
        while True:
            yield "search", None

    def _searched(self, until: float) -> Iterator[tuple[str, None]]:
        while self.used() < until:
            yield "search", None

    def _carried_over(self) -> list[Values]:
        number = min(CARRIED, int(CARRIED_SHARE * self.trials))
        return carried_over(self.legal, self.winners(), self.taken, self.rng, number)

    def _new(self, config: Config) -> bool:
        return self.legal.key(config) not in self.taken

    def _with_added_values(self) -> Iterator[Values]:
        """Yield the best configs with every value that was added to the space since the study
        began."""
        made: list[Values] = []
        walks = [self._having(name, value, made) for name, value in self.added]
        for _ in range(BASES):
            for walk in walks:
                for config in islice(walk, 1):
                    made.append(config)
                    yield config

    def _having(self, name: str, value: int | str, made: Sequence[Values]) -> Iterator[Values]:
        """Configs with a value, made from the best ones, and where the knob means nothing in any of
        these from those `made` for other values, or drawn ones."""
        space, problem, target = self.legal.space, self.legal.problem, self.legal.target
        drawn = (self.legal.draw(self.rng, ()) for _ in range(_DRAWS))
        for config in chain([*self._ranked()], made, filter(None, drawn)):
            wanted = space.normalize({**config, name: value}, problem, target)
            if wanted[name] != value:
                continue
            near = self.legal.nearest(
                wanted, self.rng, held=[name], taken=self.taken, deterministic=True
            )
            if near is not None and near[name] == value:
                yield near

    def _seeds(self) -> Iterator[Values]:
        """The starts, then the reduction kinds without a trial, in the shape of the best config."""
        adapted = [self.legal.adapt(config, self.rng) for config in self.starts]
        starts = [config for config in adapted if config is not None]
        yield from starts
        tried = {strategy_of(record.config) for record in self.records}
        for kind in sorted(self.legal.reduction_kinds, key=is_deterministic, reverse=True):
            if strategy_of(kind) in tried:
                continue
            known = [*self._ranked(), *starts]
            seed = self._with_kind(known[0], kind) if known else None
            yield seed or kind

    def _ineligible_variants(self) -> Iterator[Values]:
        """The best configs, each with every reduction kind that may not win."""
        for config in self._ranked():
            for kind in self._ineligible_kinds:
                variant = self._with_kind(config, kind, self.taken)
                if variant is not None:
                    yield variant

    @property
    def _ineligible_kinds(self) -> list[Values]:
        """Return the reduction kinds that cannot win and are measured only for the overhead of
        determinism."""
        return [kind for kind in self.legal.reduction_kinds if not is_deterministic(kind)]

    def _overhead_share(self) -> float:
        kinds = len(self._ineligible_kinds)
        if not kinds:
            return 0.0
        return min(_MAX_OVERHEAD_SHARE, max(OVERHEAD_SHARE, kinds / self.trials))

    def _with_kind(
        self, config: Config, kind: Config, taken: Collection[Key] = ()
    ) -> Values | None:
        """The legal config nearest to `config` that reduces dw as `kind` does."""
        swapped = {**config, **{name: kind[name] for name in REDUCTION_KNOBS}}
        return self.legal.nearest(swapped, self.rng, held=REDUCTION_KNOBS, taken=taken)

    def _ranked(self) -> Iterator[Config]:
        """Configs that may win, best first."""
        ranked = fastest_first(self.records, self.legal.rank)
        return (record.config for record in ranked if record.feasible)
