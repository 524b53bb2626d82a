"""The prior from winners on measured GPUs: it says where a search of predictions begins, and how
its ties are broken.

The model cannot tell apart what it predicts within its error, and knobs such as the store's hint it
does not see at all. There the winners of the nearest measured shapes decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import hypot, log2
from typing import Any

from generator.kernels.geometry import Config
from generator.problem import Problem
from generator.target import Target

TIE = 0.02
"""Predictions this close, relative to the least, are equal."""
NEAREST = 8
"""Winners that are asked."""
CARRIED = ("load_hint", "store_hint")
"""Knobs that take over the winners' values, as far as the strategy's votes are equal."""
_CARRIED_WEIGHT = 0.01


@dataclass(frozen=True)
class Measured:
    """The winner of a shape on a GPU with `sms` multiprocessors of architecture `arch`."""

    problem: Problem
    arch: str
    sms: int
    config: Config

    def distance(self, problem: Problem, target: Target) -> float:
        """Return the distance to a problem on a target, in powers of 2 of the rows per SM and of
        the columns; other differences count as a fraction of one."""
        own = self.problem
        rows = log2(own.M / self.sms * target.sms / problem.M)
        return (
            hypot(rows, log2(own.N / problem.N))
            + 1.0 * (own.itemsize != problem.itemsize)
            + 0.5 * (own.dtype != problem.dtype)
            + 0.25 * (own.weight_dtype != problem.weight_dtype)
            + 0.25 * (own.residual != problem.residual)
            + 0.5 * (self.arch != target.arch)
        )


@dataclass(frozen=True)
class Prior:
    """The winners of all measured shapes."""

    winners: tuple[Measured, ...]

    def nearest(self, problem: Problem, target: Target) -> list[Measured]:
        """The NEAREST winners, nearest first."""
        found = sorted(self.winners, key=lambda winner: winner.distance(problem, target))
        return found[:NEAREST]

    def votes(self, problem: Problem, target: Target) -> dict[tuple[str, int | str], float]:
        """The share of the nearest winners, near ones counting more, that have a value of the
        strategy or of a carried knob."""
        near = self.nearest(problem, target)
        weights = [1 / (0.5 + winner.distance(problem, target)) for winner in near]
        shares: dict[tuple[str, int | str], float] = {}
        for winner, weight in zip(near, weights, strict=True):
            for knob in ("strategy", *CARRIED):
                pair = (knob, winner.config[knob])
                shares[pair] = shares.get(pair, 0.0) + weight / sum(weights)
        return shares

    def to_json(self) -> dict[str, Any]:
        knobs = sorted({knob for winner in self.winners for knob in winner.config})
        rows = [
            [str(w.problem), w.arch, w.sms, *(w.config.get(knob) for knob in knobs)]
            for w in self.winners
        ]
        return {"knobs": knobs, "winners": rows}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Prior:
        return cls(
            tuple(
                Measured(
                    Problem.parse(problem), arch, sms, dict(zip(data["knobs"], row, strict=True))
                )
                for problem, arch, sms, *row in data["winners"]
            )
        )


def agreement(votes: Mapping[tuple[str, int | str], float], config: Config) -> float:
    """Return how much a config resembles what won: by its strategy, then by its carried knobs."""
    carried = sum(votes.get((knob, config[knob]), 0.0) for knob in CARRIED)
    return round(votes.get(("strategy", config["strategy"]), 0.0) + _CARRIED_WEIGHT * carried, 6)
