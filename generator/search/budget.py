"""The budget of a search, and the progress that it reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from generator.errors import NormforgeError
from generator.problem import Problem

TRIALS = {"measured": 400, "predicted": 14}
"""Trials of one problem unless the caller says otherwise. A prediction errs by more than further
trials gain (docs/tuning.md)."""

FORWARD_TRIALS = {"measured": 200, "predicted": 4}
"""The trials of a forward of RMSNorm: all that there are, or the first ones in the rule's order,
of which the first wins that compiles without spills and passes."""

FINALISTS = 8
"""Variants called to the finals."""


@dataclass(frozen=True)
class Budget:
    """The limits of a search: it ends after `trials` finished trials or `seconds` of search,
    whichever comes first; a resumed study counts what it has of both. sweep_limit: a space with at
    most as many legal configs, and no more than `trials`, is tried whole."""

    trials: int
    seconds: float | None = None
    sweep_limit: int = 200

    def __post_init__(self) -> None:
        for name, value in (("trials", self.trials), ("seconds", self.seconds)):
            if value is not None and not value > 0:
                raise NormforgeError(f"a budget of {value} {name} is none: give more than 0")

    def used(self, trials: int, seconds: float) -> float:
        """Fraction of the budget that is used up."""
        return max(trials / self.trials, seconds / self.seconds if self.seconds else 0.0)


@dataclass(frozen=True)
class Progress:
    """The state of a search. phase: origin of the latest trial (seed, search, neighbour, overhead,
    sweep) or "finals"; total: trials in the budget; counts: finished trials by outcome."""

    problem: Problem
    phase: str
    done: int
    total: int
    best_us: float | None
    counts: Mapping[str, int]
