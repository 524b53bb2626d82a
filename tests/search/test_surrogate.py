"""The surrogate: alike is expected to be alike, what is on its way is not tried twice over, and
where nothing is known nothing is preferred."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from generator.paths import REPOSITORY
from generator.search.surrogate import (
    WORST,
    Row,
    bounded_logs,
    expected_improvement,
    improvement,
    log_odds,
    most_promising,
)

RNG = random.Random(5)
ROWS = RNG.sample(
    [(a, b, c, d) for a in range(4) for b in range(4) for c in range(4) for d in (0, 1)], 60
)
TRIED, CANDIDATES = ROWS[:30], ROWS[30:]


def cost(row: Row) -> float:
    """Two knobs count, and add up."""
    return 1.0 + 0.1 * abs(row[0] - 2) + 0.05 * row[1]


TIMES = [cost(row) for row in TRIED]
rows = st.tuples(*[st.integers(0, 4)] * 3)
times = st.one_of(st.just(inf), st.floats(0.5, 20))


@given(
    known=st.lists(st.tuples(rows, times), max_size=12),
    pending=st.lists(rows, max_size=3),
    candidates=st.lists(rows, max_size=6),
)
def test_a_candidate_is_chosen_or_none_whatever_is_known(
    known: list[tuple[Row, float]], pending: list[Row], candidates: list[Row]
) -> None:
    tried, found = [row for row, _ in known], [time for _, time in known]
    chosen = most_promising(tried, found, pending, candidates)
    if chosen is None:
        timed = {min(time, 1.5 * min(found)) for time in found if min(found) < inf}
        assert len(timed) <= 1 or not candidates
    else:
        assert 0 <= chosen < len(candidates)
        assert chosen == candidates.index(candidates[chosen]), "the first of equals"


def test_the_candidate_that_is_like_the_fast_ones_is_chosen() -> None:
    chosen = most_promising(TRIED, TIMES, [], CANDIDATES)
    assert chosen is not None
    best = sorted(CANDIDATES, key=cost)
    assert cost(CANDIDATES[chosen]) <= cost(best[2])
    backwards = CANDIDATES[::-1]
    assert most_promising(TRIED, TIMES, [], [best[-1], best[0]]) == 1
    assert most_promising(TRIED, TIMES, [], [best[0], best[-1]]) == 0
    assert cost(backwards[most_promising(TRIED, TIMES, [], backwards) or 0]) <= cost(best[2])


def test_the_unit_of_the_times_does_not_count() -> None:
    chosen = most_promising(TRIED, TIMES, [], CANDIDATES)
    assert most_promising(TRIED, [32 * time for time in TIMES], [], CANDIDATES) == chosen


def test_how_slow_the_slow_ones_are_does_not_count() -> None:
    slow = [t if t < 1.2 else WORST + place / 100 for place, t in enumerate(TIMES, 1)]
    far = [t if t < 1.2 else inf for t in TIMES]
    assert len(set(slow)) > len(set(far)) > 2
    asked = [CANDIDATES[place : place + 3] for place in range(len(CANDIDATES) - 2)]
    assert [most_promising(TRIED, slow, [], some) for some in asked] == [
        most_promising(TRIED, far, [], some) for some in asked
    ]


def test_a_trial_without_a_time_counts_against_its_like() -> None:
    timed = [(a, b, 0) for a in range(4) for b in range(4)]
    failed = [(a, b, 1) for a in range(4) for b in range(4)]
    found = [1.0 if a == 2 else 1.4 for a, _, _ in timed] + [inf] * len(failed)
    candidates = [(2, 9, 1), (2, 9, 0)]
    assert most_promising([*timed, *failed], found, [], candidates) == 1
    odds = log_odds([*timed, *failed], bounded_logs(found), [], candidates)
    assert odds[0] < 0 < odds[1]


def test_what_is_on_its_way_counts_against_its_like() -> None:
    """Two promise the same, and the one is proposed that is unlike what is under way."""
    tried = [(a, b) for a in (0, 1, 4, 5) for b in range(4)]
    found = [1.0 if a in (1, 4) else 1.4 for a, _ in tried]
    for near, other in ((1, 4), (4, 1)):
        pending = [(near, b) for b in range(4, 10)]
        candidates = [(near, 10), (other, 10)]
        assert most_promising(tried, found, pending, candidates) == 1
        odds = log_odds(tried, bounded_logs(found), pending, candidates)
        assert odds[0] < odds[1]


def test_what_is_on_its_way_is_expected_to_bring_no_more() -> None:
    """Once it is on its way, a config promises no more than before, and many of them less."""
    logs = bounded_logs(TIMES)
    before = expected_improvement(TRIED, logs, [], CANDIDATES)
    after = expected_improvement(TRIED, logs, CANDIDATES, CANDIDATES)
    assert (before > 0).all()
    assert after.sum() < 0.9 * before.sum()


@pytest.mark.parametrize("found", [[], [1.2] * 5, [inf] * 5])
def test_nothing_is_chosen_where_nothing_tells_candidates_apart(found: list[float]) -> None:
    assert most_promising(TRIED[: len(found)], found, [TRIED[9]], CANDIDATES) is None
    assert most_promising(TRIED, TIMES, [], []) is None


@given(gains=st.lists(st.floats(-0.5, 0.5), min_size=2, max_size=9), spread=st.floats(1e-3, 0.5))
def test_more_improvement_is_expected_of_more_gain_and_of_more_spread(
    gains: list[float], spread: float
) -> None:
    spreads = np.full(len(gains), spread)
    found = improvement(np.array(gains), spreads)
    assert (found >= np.maximum(gains, 0) - 1e-9).all()
    assert (np.diff(found[np.argsort(gains)]) >= -1e-12).all()
    assert (improvement(np.array(gains), 2 * spreads) >= found - 1e-12).all()


def test_times_that_differ_by_rounding_alone_are_equal() -> None:
    nearly = [20.0, math.nextafter(20.0, 21.0), 20.0]
    assert most_promising(TRIED[:3], nearly, [], CANDIDATES) is None
    assert most_promising(TRIED[:3], nearly * 2, [], CANDIDATES[:2], [0.2, 0.1]) == 1


def test_scikit_learn_is_loaded_when_the_surrogate_is_first_asked() -> None:
    """It takes most of a second, which commands that search nothing would wait for."""
    program = (
        "import sys, generator.cli, tune, generator.search.search; print('sklearn' in sys.modules)"
    )
    run = [sys.executable, "-c", program]
    assert subprocess.check_output(run, cwd=REPOSITORY, text=True).strip() == "False"
