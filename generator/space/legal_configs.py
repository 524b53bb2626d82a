"""The legal configs of one problem on one target, and the moves between them.

There are far too many to list, so they are reached from where the search stands: the legal config
nearest to a given one, the neighbours of a good one, a random one.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import count, islice, product

from generator.kernels.geometry import Config
from generator.kernels.knobs import KNOBS
from generator.kernels.strategies import REDUCTION_KNOBS, Strategy, is_deterministic, strategy_of
from generator.problem import Problem
from generator.space.expressions import Names
from generator.space.space import Space
from generator.target import Target

Values = dict[str, int | str]
"""A config of this module's own making: every knob of the space, in its order."""
Key = tuple[int | str, ...]
"""The values of a config in the order of the knobs: its identity within one space."""

_REPAIRS = 400  # configs looked at before a repair is given up: about 30 ms
_DRAWS = 30


@dataclass(frozen=True)
class LegalConfigs:
    """The configs that `space` allows for `problem` on `target`."""

    space: Space
    problem: Problem
    target: Target

    def key(self, config: Config) -> Key:
        return tuple(config[knob.name] for knob in self.space.knobs)

    def config(self, key: Key) -> Values:
        """The config with this key."""
        return {knob.name: value for knob, value in zip(self.space.knobs, key, strict=True)}

    def rank(self, config: Config) -> tuple[int, ...]:
        """Places of the values in the file: the fixed order that breaks ties."""
        return tuple(knob.choices.index(config[knob.name]) for knob in self.space.knobs)

    def window(self, config: Config) -> int:
        """The bytes of one tensor that a full grid works on at once (`window_bytes`)."""
        names = Names(self.problem, self.target, True)
        names.update(config)
        return int(names["window_bytes"])

    def is_legal(self, config: Config) -> bool:
        """Return True if a config that may come from another space is legal as it stands."""
        known = {knob.name: knob.choices for knob in self.space.knobs}
        if config.keys() != known.keys() or any(config[n] not in known[n] for n in known):
            return False
        return self.space.reject(config, self.problem, self.target) is None

    def today(self, config: Config) -> Values | None:
        """A recorded config with the knobs of today, None where the space allows it no more."""
        complete = self.complete(config)
        return complete if self.is_legal(complete) else None

    def complete(self, config: Config) -> Values:
        """A recorded config in the order of today's knobs: those that it lacks because they were
        added later with the value that changes nothing, and without such values of knobs that the
        space has no more. It may have values that the space has no more."""
        knobs = {knob.name: knob for knob in self.space.knobs}
        added = [knob for name, knob in knobs.items() if name not in config]
        gone = sorted(config.keys() - knobs.keys())
        if not (added or gone):
            return {name: config[name] for name in knobs}
        if any(KNOBS[knob.name].neutral is None for knob in added):
            return dict(config)
        names = Names(self.problem, self.target, True)
        names.update(config)
        for knob in added:
            neutral = KNOBS[knob.name].neutral
            names[knob.name] = neutral if knob.is_active(names) else knob.otherwise
        kept = [n for n in gone if n not in KNOBS or config[n] != KNOBS[n].neutral]
        return {name: names[name] for name in (*knobs, *kept)}

    def first(self, limit: int) -> list[Values]:
        """Up to `limit` configs in the order of the file."""
        return list(islice(self.space.legal(self.problem, self.target), limit))

    @cached_property
    def reduction_kinds(self) -> tuple[Values, ...]:
        """Return the first config of every legal reduction kind, in the order of the file."""
        values = {knob.name: knob.values for knob in self.space.knobs}
        of_kinds = [values[name] for name in REDUCTION_KNOBS if name in values]
        found: dict[Strategy, Values] = {}
        for kind in product(*of_kinds):
            fixed = dict(zip(REDUCTION_KNOBS, kind, strict=False))
            for config in islice(self.space.legal(self.problem, self.target, fixed=fixed), 1):
                found.setdefault(strategy_of(config), config)
        return tuple(found.values())

    def adapt(self, config: Config, rng: random.Random) -> Values | None:
        """The legal config nearest to one that was made for another problem, target or space."""
        choices = {knob.name: knob.choices for knob in self.space.knobs}
        known = {name: value for name, value in config.items() if value in choices.get(name, ())}
        return self.nearest(known, rng)

    def nearest(
        self,
        wanted: Config,
        rng: random.Random,
        *,
        held: Collection[str] = (),
        taken: Collection[Key] = (),
        deterministic: bool = False,
    ) -> Values | None:
        """A legal config that differs from `wanted` in as few knobs as possible, not counting those
        that gain or lose their meaning; a random one of several. None when there is none, or when
        the search takes too long. held: knobs that keep their value; taken: configs to avoid;
        deterministic: leave out the determinism class `none`.

        A uniform-cost search over changes of one knob. A rejected config only becomes legal when a
        knob of the rule that rejects it changes, so no others are tried.
        """
        order = count()
        queue = [(0, 0.0, next(order), dict(wanted), frozenset(held))]
        visited: set[Key] = set()
        for _ in range(_REPAIRS):
            if not queue:
                break
            changes, _, _, raw, fixed = heappop(queue)
            config = self.space.normalize(raw, self.problem, self.target)
            key = self.key(config)
            if key in visited:
                continue
            visited.add(key)
            conflict = self._conflict(config, key, taken, deterministic)
            if not conflict:
                return config
            # Go in the order of the file: that of a set differs from process to process.
            for name in filter((conflict - fixed).__contains__, self._values):
                for value in self._values[name]:
                    if value != config[name]:
                        entry = (changes + 1, rng.random(), next(order), {**config, name: value})
                        heappush(queue, (*entry, fixed | {name}))
        return None

    def draw(self, rng: random.Random, taken: Collection[Key]) -> Values | None:
        """A random deterministic config that is not taken, or None when none is left."""
        kinds = [config for config in self.reduction_kinds if is_deterministic(config)]
        if not kinds:
            return None
        for _ in range(_DRAWS):
            kind = rng.choice(kinds)
            fixed = {name: kind[name] for name in REDUCTION_KNOBS if name in kind}
            config = self.space.sample(self.problem, self.target, rng, fixed)
            if self.key(config) not in taken:
                return config
        for config in self.space.legal(self.problem, self.target, rng=rng):
            if is_deterministic(config) and self.key(config) not in taken:
                return config
        return None

    def around(self, config: Config, rng: random.Random) -> Iterator[Values]:
        """Deterministic neighbours of a legal config: first those with one knob changed, then those
        with one knob changed and others as far as a rule then demands it. May repeat itself."""
        moves = [
            (name, value)
            for name, values in self._values.items()
            for value in values
            if value != config[name]
        ]
        rng.shuffle(moves)
        coupled = []
        for name, value in moves:
            moved = self._with_change(config, name, value)
            if moved is not None:
                yield moved
            else:
                coupled.append((name, value))
        for name, value in coupled:
            near = self.nearest({**config, name: value}, rng, held=[name], deterministic=True)
            if near is not None and near[name] == value:
                yield near

    def _with_change(self, config: Config, name: str, value: int | str) -> Values | None:
        """The config with one change, None where that means nothing or a rule rejects it."""
        moved = self.space.normalize({**config, name: value}, self.problem, self.target)
        if moved[name] != value:
            return None
        if not is_deterministic(moved):
            return None
        return None if self.space.reject(moved, self.problem, self.target) else moved

    def _conflict(
        self, config: Values, key: Key, taken: Collection[Key], deterministic: bool
    ) -> frozenset[str]:
        """The knobs of which at least one has to change; empty for a config that will do."""
        if deterministic and not is_deterministic(config):
            return frozenset(REDUCTION_KNOBS)
        rejection = self.space.reject(config, self.problem, self.target)
        if rejection is not None:
            # No knob helps where what the space fixes cannot be had.
            return self._knobs_of_rule.get(rejection.rule, frozenset(self._values))
        return frozenset(self._values) if key in taken else frozenset()

    @cached_property
    def _values(self) -> dict[str, tuple[int | str, ...]]:
        return {knob.name: knob.values for knob in self.space.knobs}

    @cached_property
    def _knobs_of_rule(self) -> dict[str, frozenset[str]]:
        knobs = self._values.keys()
        return {rule.id: rule.require.knobs & knobs for rule in self.space.rules}
