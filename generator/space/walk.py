"""Knobs, rules, and the walk through all values of the knobs that comes by every legal config."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from generator.errors import NormforgeError
from generator.kernels.geometry import Config
from generator.space.expressions import Expression, Names

PATIENCE = 1_000_000
"""Values of knobs tried in vain before a search for legal configs is given up: a few seconds. Where
the rules of this project allow nothing it takes less than half of that to know."""


@dataclass(frozen=True)
class Knob:
    """One choice. `otherwise` is its value where `when` does not hold."""

    name: str
    values: tuple[int | str, ...]
    why: str
    when: Expression | None
    otherwise: int | str

    @property
    def choices(self) -> tuple[int | str, ...]:
        """Every value the knob can have in a config, searched or not."""
        if self.otherwise in self.values:
            return self.values
        return (*self.values, self.otherwise)

    def is_active(self, names: Names) -> bool:
        """Return True if the knob has a meaning beside the knobs above it, which are in `names`."""
        return self.when is None or bool(self.when(names))


@dataclass(frozen=True)
class Rule:
    """`require` must hold; `say_parts` make a sentence with the names when it does not."""

    id: str
    require: Expression
    say_parts: tuple[tuple[str, Expression | None, str], ...]

    def sentence(self, names: Mapping[str, Any]) -> str:
        text = ""
        for literal, expression, spec in self.say_parts:
            text += literal
            if expression is not None:
                text += _formatted(expression, expression(names), spec)
        return text


def _formatted(expression: Expression, value: Any, spec: str) -> str:
    try:
        return format(value, spec)
    except (MemoryError, TypeError, ValueError) as error:
        why = str(error) or "out of memory"
        raise NormforgeError(
            f"{expression.where}: '{expression.text}' cannot be shown as '{spec}' ({why})"
        ) from error


@dataclass(frozen=True)
class Tree:
    """Every knob is a level of it, in the order of the file; a set of knobs is a number, of which
    the first knob is the lowest bit."""

    knobs: tuple[Knob, ...]
    rules: tuple[Rule, ...]

    def walk(
        self, names: Names, fixed: Config, own: Config, rng: random.Random | None
    ) -> Iterator[dict[str, int | str]]:
        """Do what `Space.legal` says. names: of the problem and the target; own: what is fixed for
        knobs without a meaning, too.

        A walk that meets rules in vain goes back to the last knob that one of them depends on,
        because no value of the knobs behind it helps. Wide rows leave few configs: without this, a
        draw for rows of 65,536 columns took ten times as long, and a trial several seconds.
        """
        fixed = {**fixed, **own}
        tried = 0

        def descend(index: int) -> Generator[dict[str, int | str], None, int]:
            """Returns the knobs whose values allow no config; all where there was one, or where
            nobody knows."""
            nonlocal tried
            if index == len(self.knobs):
                tried = 0
                yield {knob.name: names[knob.name] for knob in self.knobs}
                return -1
            knob = self.knobs[index]
            active = knob.is_active(names)
            values: Sequence[int | str] = knob.values if active else (knob.otherwise,)
            if knob.name in own or (knob.name in fixed and active):
                values = [value for value in values if value == fixed[knob.name]]
            if rng is not None and len(values) > 1:
                values = rng.sample(values, len(values))
            in_vain = self._needed_by_knob[index]
            for value in values:
                tried += 1
                if tried > PATIENCE:
                    return -1
                names[knob.name] = value
                broken = (b for rule, b in self._rules_after[index + 1] if not rule.require(names))
                in_the_way = next(broken, 0) or (yield from descend(index + 1))
                del names[knob.name]
                if not in_the_way >> index & 1:
                    return in_the_way
                in_vain |= in_the_way
            return in_vain if in_vain < 0 else in_vain & ~(1 << index)

        if all(rule.require(names) for rule, _ in self._rules_after[0]):
            yield from descend(0)

    @cached_property
    def _rules_after(self) -> tuple[tuple[tuple[Rule, int], ...], ...]:
        """Rules with the knobs they need, by the number of the last one counted from 1, so that
        they are asked early."""
        after: list[list[tuple[Rule, int]]] = [[] for _ in range(len(self.knobs) + 1)]
        for rule in self.rules:
            needed = self._set(rule.require)
            after[needed.bit_length()].append((rule, needed))
        return tuple(map(tuple, after))

    @cached_property
    def _needed_by_knob(self) -> tuple[int, ...]:
        """The knobs on which it depends whether each of them has a meaning."""
        return tuple(self._set(knob.when) for knob in self.knobs)

    def _set(self, expression: Expression | None) -> int:
        """Return the knobs that an expression needs."""
        needed = expression.knobs if expression else frozenset()
        return sum(1 << place for place, knob in enumerate(self.knobs) if knob.name in needed)
