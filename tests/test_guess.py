"""Guesses: alike is expected to be alike, what is on its way is not tried twice over."""

from __future__ import annotations

import random

import pytest

from generator.guess import FEWEST, Guesser
from generator.legal import LegalConfigs
from generator.result import Result
from generator.space import load_space
from generator.store import Record
from generator.variant import Config
from tests.synthetic import PROBLEM, TARGET, timed

SPACE = load_space()
LEGAL = LegalConfigs(SPACE, PROBLEM, TARGET)
RNG = random.Random(5)
DRAWN = [LEGAL.space.sample(PROBLEM, TARGET, RNG) for _ in range(40)]


def tried(config: Config, result: Result) -> Record:
    return Record(config, "v", result, "tpe", 0.0)


def by_stages(config: Config) -> float:
    """Only the pipeline and the stages count."""
    return 1.1 + 0.1 * (config["pipeline"] != "async") + 0.05 * (config["stages"] != 4)


RECORDS = [tried(config, timed(by_stages(config))) for config in DRAWN]


def test_the_candidate_that_is_like_the_fast_ones_is_guessed() -> None:
    best = min(RECORDS, key=lambda record: record.ratio).config
    worst = max(RECORDS, key=lambda record: record.ratio).config
    near = {**best, "store_hint": "streaming" if best["store_hint"] == "default" else "default"}
    far = {**worst, "store_hint": "streaming" if worst["store_hint"] == "default" else "default"}
    assert Guesser(SPACE).best(RECORDS, [], [far, near]) == near
    assert Guesser(SPACE).best(RECORDS, [], [near, far]) == near


def test_guesses_find_the_fastest_of_many_with_few_trials() -> None:
    guesser, records = Guesser(SPACE), list(RECORDS[:8])
    known = [record.config for record in records]
    candidates = [c for c in LEGAL.first(400) + DRAWN[8:] if c not in known]
    for _ in range(25):
        guess = guesser.best(records, [], candidates)
        assert guess is not None
        candidates.remove(dict(guess))
        records.append(tried(guess, timed(by_stages(guess))))
    lowest = min(map(by_stages, [*candidates, *(record.config for record in records)]))
    assert min(record.ratio for record in records) == lowest


def test_a_trial_without_a_time_counts_against_its_like() -> None:
    fast = min(RECORDS, key=lambda record: record.ratio).config
    one, other = ({**fast, "grid": grid, "load_hint": "default"} for grid in ("full", "even"))
    failed = [
        tried({**one, "slice_columns": columns}, Result("resource")) for columns in (64, 128, 16)
    ]
    assert Guesser(SPACE).best([*RECORDS, *failed], [], [one, other]) == other


def test_what_is_on_its_way_is_expected_and_not_asked_for_again() -> None:
    fast = min(RECORDS, key=lambda record: record.ratio).config
    candidates = [
        {**fast, "rows_per_cta": rows, "ctas_per_sm": ctas} for rows in (1, 2, 4) for ctas in (1, 2)
    ]
    guesser = Guesser(SPACE)
    first = guesser.best(RECORDS, [], candidates)
    assert first is not None
    near = [{**first, "grid": "full"}, {**first, "grid": "even"}]
    second = guesser.best(RECORDS, near, candidates)
    assert second != first


@pytest.mark.parametrize("count", [0, FEWEST - 1])
def test_nothing_is_guessed_from_too_little(count: int) -> None:
    untimed = [tried(config, Result("resource")) for config in DRAWN]
    assert Guesser(SPACE).best(RECORDS[:count] + untimed, [], DRAWN) is None
    assert Guesser(SPACE).best(RECORDS, [], []) is None
