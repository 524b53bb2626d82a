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
HOST_US = 12.0
"""About what the host takes for one call. Calls that take the GPU less wait for the host, except in
a CUDA graph."""
LAUNCH_US = 0.25
"""What a launch less may cost the GPU in each of them: it saves the host 2 to 3 us."""


def slack(best: Result, config: Config, best_config: Config) -> float:
    """How much slower than the best one a variant may be and count as equal, relative to it."""
    saved = launches(best_config) - launches(config)
    if best.us is None or best.us >= HOST_US or saved <= 0:
        return TIE
    return max(TIE, saved * LAUNCH_US / best.us)


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
    "measured" or "predicted"; tied: the finalists that `choose` took for equal, and the winner;
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

    Equal are those within 1 % of the best. Kernels of one launch come before those of two; where
    the host takes longer for a call than the GPU they may even be LAUNCH_US slower than the best,
    and equal are those within 1 % of the fastest of them. Among equals the first in the order of
    `rank` wins: places of the values in the space's file, knob by knob, strategy first. Nothing
    that was measured takes part in that, so repeated finals agree. The incumbent stays while it is
    among them, unless it needs one launch more than another.
    """
    times = {
        place: result.ratio
        for place, (config, result) in enumerate(finals)
        if may_win(config, result) and result.ratio is not None
    }
    if not times:
        return None
    first = min(times, key=times.__getitem__)
    best, (fastest, fastest_result) = times[first], finals[first]

    def behind(place: int) -> str:
        return f"{times[place] / best - 1:.1%} behind the fastest"

    near = [
        place
        for place, ratio in times.items()
        if ratio <= best * (1 + slack(fastest_result, finals[place][0], fastest))
    ]
    fewest = min(launches(finals[place][0]) for place in near)
    leading = min(times[place] for place in near if launches(finals[place][0]) == fewest)
    tied = sorted(
        (place for place in near if times[place] <= leading * (1 + TIE)),
        key=lambda place: (launches(finals[place][0]), rank(finals[place][0])),
    )
    before = ""
    for place, (config, result) in enumerate(finals):
        if config != incumbent:
            continue
        if place in tied and launches(config) == launches(finals[tied[0]][0]):
            stays = "not beaten by more than 1 %"
            if times[place] > best * (1 + TIE):
                stays = f"{behind(place)}, in one launch instead of two"
            return Choice(place, tuple(tied), f"the incumbent: {stays}")
        if place in tied:
            before = "counts as fast as the incumbent, in one launch instead of two: "
        elif place in times:
            gap = times[place] / times[tied[0]] - 1
            before = f"beat the incumbent by {gap:.1%}: "
            if gap <= 0:
                before = f"the incumbent is {behind(place)}: "
        else:
            before = f"the incumbent failed in the finals ({result.outcome}): "
    if times[tied[0]] > best * (1 + TIE):
        reason = f"{behind(tied[0])}, in one launch instead of two"
    elif len(tied) == 1:
        reason = f"fastest of {len(times)} finalists that may win"
    else:
        reason = f"first in the order of the space of {len(tied)} finalists that count as equal"
    return Choice(tied[0], tuple(tied), before + reason)
