"""The winner of a problem, and the fixed rules that choose it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from generator.problem import Problem
from generator.result import Result
from generator.variant import Config, determinism_class, launches

TIE = 0.01
"""Ratios this close, relative to the best, are equal: repeated finals differ by less than that."""


def may_win(config: Config, result: Result) -> bool:
    """Whether a variant with this result can be a winner. The determinism class counts as well: an
    atomic sum that happened to repeat its bits in every run is still not deterministic."""
    return result.may_win and determinism_class(config) != "none"


@dataclass(frozen=True)
class Finalist:
    """A variant and its time in the finals. ratio is to the floor of the same blocks."""

    variant: str
    config: Mapping[str, int | str]
    us: float
    ratio: float


@dataclass(frozen=True)
class Winner:
    """The chosen variant of one problem and how it was chosen.

    variant: its id; cubin: digest of its machine code; result: that of the finals; evidence:
    "measured" or "predicted"; tied: the finalists within 1 % of the best, the winner among them;
    fastest_nondeterministic: the fastest variant that may not win because its bits change, None
    where none was timed; trials and counts: finished trials, in all and by outcome; reason: one
    sentence; date: end of the finals, UTC, ISO 8601.
    """

    problem: Problem
    target: str
    config: Mapping[str, int | str]
    variant: str
    cubin: str
    result: Result
    evidence: str
    tied: tuple[Finalist, ...]
    fastest_nondeterministic: Finalist | None
    trials: int
    counts: Mapping[str, int]
    study: str
    space_hash: str
    reason: str
    date: str

    @property
    def price_of_determinism(self) -> float | None:
        """Time of the winner over that of the fastest non-deterministic variant."""
        if self.fastest_nondeterministic is None or self.result.ratio is None:
            return None
        return self.result.ratio / self.fastest_nondeterministic.ratio

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"problem": str(self.problem)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Winner:
        fastest = data["fastest_nondeterministic"]
        known = {
            "problem": Problem.parse(data["problem"]),
            "result": Result.from_json(data["result"]),
            "tied": tuple(Finalist(**entry) for entry in data["tied"]),
            "fastest_nondeterministic": Finalist(**fastest) if fastest else None,
        }
        return cls(**{**data, **known})


def keep_measured(previous: Winner | None, new: Winner | None) -> Winner | None:
    """Which of two winners of the same problem and target stands: the new one, unless there is none
    or it is only predicted where the previous one was measured."""
    if new is None or previous is None:
        return new or previous
    if previous.evidence == "measured" and new.evidence == "predicted":
        return previous
    return new


@dataclass(frozen=True)
class Choice:
    """Places of the winner and of the tied in the finals, and the reason."""

    winner: int
    tied: tuple[int, ...]
    reason: str


def choose(
    finals: Sequence[tuple[Config, Result]],
    rank: Callable[[Config], tuple[int, ...]],
    incumbent: Config | None,
) -> Choice | None:
    """The winner of the finals, None when none may win.

    Among those within 1 % of the best, kernels of one launch come before those of two, because a
    launch costs the host 2 to 3 us; then the first in the order of `rank` wins: places of the
    values in the space's file, knob by knob, strategy first. Nothing that was measured takes part
    in that, so repeated finals agree. The incumbent stays while it is within 1 % of the best,
    unless it needs one launch more than another that is.
    """
    times = {
        place: result.ratio
        for place, (config, result) in enumerate(finals)
        if may_win(config, result) and result.ratio is not None
    }
    if not times:
        return None
    best = min(times.values())
    tied = sorted(
        (place for place, ratio in times.items() if ratio <= best * (1 + TIE)),
        key=lambda place: (launches(finals[place][0]), rank(finals[place][0])),
    )
    before = ""
    for place, (config, result) in enumerate(finals):
        if config != incumbent:
            continue
        if place in tied and launches(config) == launches(finals[tied[0]][0]):
            return Choice(place, tuple(tied), "the incumbent: not beaten by more than 1 %")
        if place in tied:
            before = "as fast as the incumbent, in one launch instead of two: "
        elif place in times:
            before = f"beat the incumbent by {times[place] / best - 1:.1%}: "
        else:
            before = f"the incumbent failed in the finals ({result.outcome}): "
    if len(tied) == 1:
        reason = f"fastest of {len(times)} finalists that may win"
    else:
        reason = f"first in the order of the space of {len(tied)} finalists within 1 %"
    return Choice(tied[0], tuple(tied), before + reason)
