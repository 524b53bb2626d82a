"""Tries the winners of neighbouring shapes: before its finals, a search tries each that it has not
tried yet."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable
from dataclasses import fields
from itertools import zip_longest
from typing import Any

from generator.problem import Problem
from generator.search.starts import distance, warm_starts
from generator.space.legal_configs import Key, LegalConfigs, Values
from generator.studies.records import Winner

NEAREST = 2
"""Neighbours of each kind whose winners are carried over."""
CARRIED = 6
"""Configs that are carried over at most."""
CARRIED_SHARE = 0.1
"""Share of the budget that they take at most."""
_KINDS = (("M",), ("N",), ("dtype", "weight_dtype", "residual"))


def neighbours(problem: Problem, target: str, winners: Iterable[Winner]) -> list[Winner]:
    """The last measured winners, on the same kind of GPU, of the NEAREST problems of each kind:
    those that differ in M alone, in N alone, and in dtypes or the residual alone. The nearest of
    every kind come first."""
    last = {
        winner.problem: winner
        for winner in winners
        if winner.evidence == "measured" and winner.target == target
    }
    last.pop(problem, None)
    of_kinds = []
    for kind in _KINDS:
        own = [w for w in last.values() if _all_but(kind, w.problem) == _all_but(kind, problem)]
        own.sort(key=lambda winner: (distance(winner.problem, problem), str(winner.problem)))
        of_kinds.append(own[:NEAREST])
    return [winner for turn in zip_longest(*of_kinds) for winner in turn if winner is not None]


def _all_but(names: Collection[str], problem: Problem) -> list[Any]:
    return [getattr(problem, f.name) for f in fields(problem) if f.name not in names]


def carried_over(
    legal: LegalConfigs,
    winners: Iterable[Winner],
    taken: Collection[Key],
    rng: random.Random,
    number: int,
) -> list[Values]:
    """Up to `number` configs that won at neighbours and are not `taken`, or the nearest legal ones,
    among which `rng` draws."""
    found: dict[Key, Values] = {}
    for winner in neighbours(legal.problem, legal.target.name, winners):
        for config in warm_starts(legal.problem, legal.target, [winner]):
            near = legal.adapt(config, rng)
            if near is not None and legal.key(near) not in taken:
                found.setdefault(legal.key(near), near)
    return list(found.values())[:number]
