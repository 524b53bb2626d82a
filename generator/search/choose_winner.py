"""The winner of a problem, and the fixed rules that choose it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from generator.evaluate.evaluator import Evaluator, Preferring
from generator.kernels.geometry import Config
from generator.kernels.strategies import launches
from generator.problem import FORWARDS, Problem
from generator.result import Result
from generator.studies.records import INCUMBENT_STAYS, may_win

TIE = 0.005
"""Ratios this close, relative to the best, are equal."""
INCUMBENT_TIE = 0.01
"""The incumbent stays where it is this close: twice as much, so that noise alone does not replace
it."""


HOST_US = 12.0
"""About what the host takes for one call. Calls that take the GPU less wait for the host, except in
a CUDA graph."""


LAUNCH_US = 0.25
"""Microseconds that such a call may take longer on the GPU for one launch fewer, which saves the
host 2 to 3 us."""


def slack(best: Result, config: Config, best_config: Config, tie: float) -> float:
    """Return how much slower than the best one, relative to it, a variant may be and count as
    equal."""
    saved = launches(best_config) - launches(config)
    if best.us is None or best.us >= HOST_US or saved <= 0:
        return tie
    return max(tie, saved * LAUNCH_US / best.us)


@dataclass(frozen=True)
class Preference:
    """The preference among uncertain times. tie: times this close, relative to the best, are equal;
    agreement: of equal configs the one with the highest wins; said: what that one is called."""

    tie: float
    agreement: Callable[[Config], float]
    said: str = "most like winners on measured GPUs"

    def key(self, config: Config, ratio: float, best: float) -> tuple[bool, float, float]:
        """Sorts configs by who wins: first those that equal the best ratio, by agreement and then
        by ratio, then all others by ratio."""
        if ratio > best * (1 + self.tie):
            return True, 0.0, ratio
        return False, -self.agreement(config), ratio


def preference_of(evaluator: Evaluator, problem: Problem) -> Preference | None:
    """Return an evaluator's preference for a problem, None where its times decide."""
    if not isinstance(evaluator, Preferring):
        return None
    agreement = partial(evaluator.agreement, problem)
    if problem.operation in FORWARDS:
        return Preference(evaluator.tie, agreement, "first in the order of the rule")
    return Preference(evaluator.tie, agreement)


def expected_error(result: Result) -> str:
    """A clause about a predicted time, nothing about a measured one."""
    error = result.extra.get("expected_error")
    return (
        f"; expected error {error:.0%} of the time over the floor, as on measured GPUs"
        if error
        else ""
    )


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
    preference: Preference | None = None,
) -> Choice | None:
    """The winner of the finals, None when none may win.

    Equal are those within TIE of the best. Kernels of one launch come before those of two; where
    the host takes longer for a call than the GPU they may even be LAUNCH_US slower than the best,
    and equal are those within TIE of the fastest of them. Among equals the first in the order of
    `rank` wins: places of the values in the space's file, knob by knob, strategy first. Nothing
    that was measured takes part in that. An incumbent that is equal with INCUMBENT_TIE in place of
    TIE stays, unless the one that wins without it needs fewer launches. So whoever wins does so
    again at the same times.

    With a preference, equal are those within its tie. The incumbent stays if it is one of them.
    Otherwise the one that the preference agrees with most wins, of several the fastest.
    """
    times = {
        place: result.ratio
        for place, (config, result) in enumerate(finals)
        if may_win(config, result) and result.ratio is not None
    }
    if not times:
        return None
    place = next((p for p, (config, _) in enumerate(finals) if config == incumbent), None)
    tie = preference.tie if preference else TIE
    tied = _tied(finals, times, rank, preference, tie)
    winner, best = tied[0], min(times.values())
    equal = stays = place in tied
    if preference is None and place in times:
        kept = _tied(finals, times, rank, None, INCUMBENT_TIE)
        equal = place in kept
        stays = equal and launches(finals[place][0]) <= launches(finals[winner][0])
        if stays:
            tied, tie = kept, INCUMBENT_TIE

    def late(place: int) -> str:
        return f"{times[place] / best - 1:.1%} behind the fastest"

    def reason(place: int, otherwise: str) -> str:
        saved = times[place] > best * (1 + tie)
        return f"{late(place)}, in one launch instead of two" if saved else otherwise

    before = ""
    if place is not None and stays:
        why = reason(place, f"not beaten by more than {100 * tie:g} %")
        return Choice(place, tied, INCUMBENT_STAYS + why)
    if equal:
        before = "counts as fast as the incumbent, in one launch instead of two: "
    elif place in times:
        gap = times[place] / times[winner] - 1
        before = f"beat the incumbent by {gap:.1%}: "
        if gap <= 0:
            before = f"the incumbent is {late(place)}: "
    elif place is not None:
        before = f"the incumbent failed in the finals ({finals[place][1].outcome}): "
    if len(tied) == 1:
        found = f"fastest of {len(times)} finalists that may win"
    else:
        first = preference.said if preference else "first in the order of the space"
        found = f"{first} of {len(tied)} finalists that count as equal"
    return Choice(winner, tied, before + reason(winner, found))


def _tied(
    finals: Sequence[tuple[Config, Result]],
    times: Mapping[int, float],
    rank: Callable[[Config], tuple[int, ...]],
    preference: Preference | None,
    tie: float,
) -> tuple[int, ...]:
    """Places of the finalists that count as equal, the one that wins first. times: ratios of those
    that may win, by their places."""
    first = min(times, key=times.__getitem__)
    if preference:
        keys = {p: preference.key(finals[p][0], times[p], times[first]) for p in times}
        equal = [place for place, (behind, *_) in keys.items() if not behind]
        return tuple(sorted(equal, key=lambda p: (keys[p], rank(finals[p][0]))))

    fastest, fastest_result = finals[first]
    near = [
        place
        for place, ratio in times.items()
        if ratio <= times[first] * (1 + slack(fastest_result, finals[place][0], fastest, tie))
    ]
    fewest = min(launches(finals[place][0]) for place in near)
    with_fewest = [place for place in near if launches(finals[place][0]) == fewest]
    leading = min(times[place] for place in with_fewest)
    equal = [place for place in near if times[place] <= leading * (1 + tie)]
    return tuple(sorted(equal, key=lambda p: (launches(finals[p][0]), rank(finals[p][0]))))
