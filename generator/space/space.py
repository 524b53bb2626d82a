"""The search space: its legal configs, and the rule that rejects an illegal one."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from generator.errors import NormforgeError
from generator.kernels.geometry import Config
from generator.kernels.knobs import KNOBS
from generator.problem import Problem
from generator.space.expressions import Names
from generator.space.walk import Knob, Rule, Tree
from generator.target import Target


@dataclass(frozen=True)
class Fixed:
    """The only values that knobs have at some widths N and dtypes of x."""

    widths: tuple[int, ...]
    dtypes: tuple[str, ...]
    knobs: tuple[tuple[str, int | str], ...]


@dataclass(frozen=True)
class Rejection:
    """The rule that makes a config illegal for a problem on a target."""

    rule: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.sentence}"


@dataclass(frozen=True)
class Space:
    """The knobs and rules of one YAML file, and what it fixes for some problems."""

    path: Path
    knobs: tuple[Knob, ...]
    rules: tuple[Rule, ...]
    fixed: tuple[Fixed, ...] = ()

    def without(self, name: str, value: int | str) -> Space:
        """The space without one value of a knob, which stays if the knob has no other."""
        left = {k: tuple(v for v in k.values if v != value) for k in self.knobs if k.name == name}
        knobs = (replace(k, values=left.get(k) or k.values) for k in self.knobs)
        return replace(self, knobs=tuple(knobs))

    def fixed_for(self, problem: Problem) -> dict[str, int | str]:
        """The knobs that have one value for all problems of this one's N and dtype. Raises
        NormforgeError where the space fixes knobs for others only."""
        entry = self._fixed_entry(problem)
        return dict(entry.knobs) if entry else {}

    def _fixed_entry(self, problem: Problem) -> Fixed | None:
        for entry in self.fixed:
            if problem.N in entry.widths and problem.dtype in entry.dtypes:
                return entry
        if self.fixed:
            raise NormforgeError(
                f"{self.path.name} fixes nothing for rows of {problem.N} {problem.dtype}, and the "
                "bits would depend on M: add an entry to 'fixed'"
            )
        return None

    def digest(self, problem: Problem) -> str:
        """Twelve hex digits over knobs, values, rules (not the prose) and what is fixed for a
        problem."""
        own = self._fixed_entry(problem)
        content = [
            [(k.name, k.values, k.when and k.when.text, k.otherwise) for k in self.knobs],
            [(r.id, r.require.text) for r in self.rules],
            *([own.knobs] if own else []),
        ]
        return hashlib.sha256(repr(content).encode()).hexdigest()[:12]

    @cached_property
    def _position(self) -> dict[str, int]:
        return {knob.name: index for index, knob in enumerate(self.knobs)}

    @cached_property
    def _tree(self) -> Tree:
        return Tree(self.knobs, self.rules)

    def normalize(self, config: Config, problem: Problem, target: Target) -> dict[str, int | str]:
        """The config with every knob present: fixed ones at that value, those without meaning at
        `otherwise`, missing ones at their first value, or the one of a knob added later that
        changes nothing. Raises NormforgeError for an unknown knob or a value that the space does
        not have."""
        for name, value in config.items():
            if name not in self._position:
                raise NormforgeError(f"unknown knob '{name}': {self.path.name} has none such")
            choices = self.knobs[self._position[name]].choices
            if value not in choices:
                raise NormforgeError(f"knob '{name}' has no value {value!r}: it has {choices}")
        names = Names(problem, target, True)
        fixed = self.fixed_for(problem)
        for knob in self.knobs:
            wanted = fixed.get(knob.name, config.get(knob.name, KNOBS[knob.name].neutral))
            value = wanted if wanted in knob.values else knob.values[0]
            names[knob.name] = value if knob.is_active(names) else knob.otherwise
        return {knob.name: names[knob.name] for knob in self.knobs}

    def active_knobs(self, config: Config, problem: Problem, target: Target) -> set[str]:
        """The knobs that mean anything in a config; those that it lacks have `otherwise`."""
        names = Names(problem, target, True)
        found = set()
        for knob in self.knobs:
            if knob.is_active(names):
                found.add(knob.name)
            names[knob.name] = config.get(knob.name, knob.otherwise)
        return found

    def reject(
        self,
        config: Config,
        problem: Problem,
        target: Target,
        *,
        exact: bool = True,
        in_blocks: bool = True,
    ) -> Rejection | None:
        """The first rule that the complete config breaks, or None when it is legal."""
        names = Names(problem, target, exact, in_blocks)
        names.update(config)
        for rule in self.rules:
            if not rule.require(names):
                return Rejection(rule.id, rule.sentence(names))
        if other := self._not_fixed(config, problem):
            return other
        for knob in self.knobs:
            active = knob.is_active(names)
            if config[knob.name] not in (knob.values if active else (knob.otherwise,)):
                sentence = f"{knob.name} cannot be {config[knob.name]} here: when {knob.when}"
                return Rejection("when", sentence)
        return None

    def broken_rules(self, config: Config, problem: Problem, target: Target) -> list[Rejection]:
        """Every rule that the complete config breaks."""
        names = Names(problem, target, True)
        names.update(config)
        broken = (rule for rule in self.rules if not rule.require(names))
        return [Rejection(rule.id, rule.sentence(names)) for rule in broken]

    def _not_fixed(self, config: Config, problem: Problem) -> Rejection | None:
        """The first knob that has another value than the space fixes."""
        for name, value in self.fixed_for(problem).items():
            if config[name] != value:
                kind = f"all {problem.N} columns of {problem.dtype}"
                why = f"{name} is {value} for {kind}, not {config[name]}: their bits depend on it"
                return Rejection("fixed", why)
        return None

    def legal(
        self,
        problem: Problem,
        target: Target,
        *,
        rng: random.Random | None = None,
        fixed: Config | None = None,
    ) -> Iterator[dict[str, int | str]]:
        """Legal configs, each once: in the order of the file, or in an order drawn by `rng`
        (a random walk of the same tree). `fixed` narrows knobs to one value each. Ends early when
        walk.PATIENCE values were tried since the last legal config."""
        own = self.fixed_for(problem)  # also for knobs without a meaning here
        return self._tree.walk(Names(problem, target, True), fixed or {}, own, rng)

    def sample(
        self, problem: Problem, target: Target, rng: random.Random, fixed: Config | None = None
    ) -> dict[str, int | str]:
        """One legal config drawn by `rng`. Raises NormforgeError naming the rule that rejects most
        often when there is none."""
        for config in self.legal(problem, target, rng=rng, fixed=fixed):
            return config
        raise NormforgeError(
            f"{self.path.name} has no legal config for {problem} on {target}"
            + (f" with {dict(fixed)}" if fixed else "")
            + self._why_none(problem, target, rng, fixed or {})
        )

    def _why_none(self, problem: Problem, target: Target, rng: random.Random, fixed: Config) -> str:
        """The rule that most random configs break: where nothing is legal, the one that is in the
        way whatever the others leave. Its sentence is about the config that breaks fewest rules."""
        counts: Counter[str] = Counter()
        nearest: dict[str, tuple[int, Rejection]] = {}
        for _ in range(300):
            drawn = {k.name: fixed.get(k.name, rng.choice(k.values)) for k in self.knobs}
            config = self.normalize(drawn, problem, target)
            if other := self._not_fixed(config, problem):
                return f"; {other}"
            broken = self.broken_rules(config, problem, target)
            for rejection in broken:
                counts[rejection.rule] += 1
                if rejection.rule not in nearest or len(broken) < nearest[rejection.rule][0]:
                    nearest[rejection.rule] = (len(broken), rejection)
        if not counts:
            return ""
        return f"; the rule met most: {nearest[counts.most_common(1)[0][0]][1]}"
