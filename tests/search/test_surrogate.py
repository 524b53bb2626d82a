"""The surrogate: alike is expected to be alike, what is on its way is not tried twice over, and
what is kept to make proposals cheap does not change them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from itertools import combinations

import numpy as np
import pytest

from generator.kernels.geometry import Config
from generator.result import Result
from generator.search import surrogate
from generator.search.surrogate import (
    FEWEST,
    LENGTHS,
    NOISE,
    OTHER_WEIGHT,
    WEIGHTS,
    WORST,
    Floats,
    Surrogate,
)
from generator.space.legal_configs import Key, LegalConfigs
from generator.space.load import load_space
from generator.studies.records import Record
from tests.support.synthetic import PROBLEM, TARGET, timed

SPACE = load_space()
LEGAL = LegalConfigs(SPACE, PROBLEM, TARGET)
RNG = random.Random(5)
DRAWN = [LEGAL.space.sample(PROBLEM, TARGET, RNG) for _ in range(40)]


def tried(config: Config, result: Result) -> Record:
    return Record(config, "v", result, "tpe", 0.0)


def by_stages(config: Config) -> float:
    """Only the pipeline and the stages count."""
    return 1.1 + 0.1 * (config["pipeline"] != "async") + 0.05 * (config["stages"] != 4)


def by_many(config: Config) -> float:
    """Every knob counts, and all add up."""
    return 1.1 + 0.02 * sum(LEGAL.rank(config))


RECORDS = [tried(config, timed(by_stages(config))) for config in DRAWN]


def keys(configs: Iterable[Config]) -> list[Key]:
    return [LEGAL.key(config) for config in configs]


def proposed(
    records: Sequence[Record], pending: Sequence[Config], candidates: Sequence[Config]
) -> Config | None:
    key = Surrogate(SPACE).best(
        records, keys(r.config for r in records), keys(pending), keys(candidates)
    )
    return None if key is None else LEGAL.config(key)


def test_the_candidate_that_is_like_the_fast_ones_is_proposed() -> None:
    best = min(RECORDS, key=lambda record: record.ratio).config
    worst = max(RECORDS, key=lambda record: record.ratio).config
    near = {**best, "store_hint": "streaming" if best["store_hint"] == "default" else "default"}
    far = {**worst, "store_hint": "streaming" if worst["store_hint"] == "default" else "default"}
    assert proposed(RECORDS, [], [far, near]) == near
    assert proposed(RECORDS, [], [near, far]) == near


def test_surrogate_proposals_find_the_fastest_of_many_with_few_trials() -> None:
    model, records = Surrogate(SPACE), list(RECORDS[:8])
    known = [record.config for record in records]
    candidates = [c for c in LEGAL.first(400) + DRAWN[8:] if c not in known]
    for _ in range(25):
        key = model.best(records, keys(r.config for r in records), [], keys(candidates))
        assert key is not None
        candidates.remove(LEGAL.config(key))
        records.append(tried(LEGAL.config(key), timed(by_stages(LEGAL.config(key)))))
    lowest = min(map(by_stages, [*candidates, *(record.config for record in records)]))
    assert min(record.ratio for record in records) == lowest


def test_a_trial_without_a_time_counts_against_its_like() -> None:
    fast = min(RECORDS, key=lambda record: record.ratio).config
    one, other = ({**fast, "grid": grid, "load_hint": "default"} for grid in ("full", "even"))
    failed = [
        tried({**one, "slice_columns": columns}, Result("resource")) for columns in (64, 128, 16)
    ]
    assert proposed([*RECORDS, *failed], [], [one, other]) == other


def test_what_is_on_its_way_is_expected_and_not_asked_for_again() -> None:
    records = [tried(config, timed(by_many(config))) for config in DRAWN]
    fast = min(records, key=lambda record: record.ratio).config
    candidates = [
        {**fast, "rows_per_cta": rows, "ctas_per_sm": ctas} for rows in (1, 2, 4) for ctas in (1, 2)
    ]
    first = proposed(records, [], candidates)
    assert first is not None
    near = [{**first, "grid": "full"}, {**first, "grid": "even"}]
    second = proposed(records, near, candidates)
    assert second != first


@pytest.mark.parametrize("count", [0, FEWEST - 1])
def test_nothing_is_proposed_from_too_little(count: int) -> None:
    untimed = [tried(config, Result("resource")) for config in DRAWN]
    assert proposed(RECORDS[:count] + untimed, [], DRAWN) is None
    assert proposed(RECORDS, [], []) is None


def log_times(records: Sequence[Record]) -> Floats:
    worst = math.log(min(record.ratio for record in records)) + WORST
    return np.array([min(math.log(record.ratio), worst) for record in records])


def covariance(one: Sequence[Key], other: Sequence[Key], length: float) -> Floats:
    weights = [WEIGHTS.get(knob.name, OTHER_WEIGHT) for knob in SPACE.knobs]
    differ = [
        [sum(w for w, a, b in zip(weights, x, y, strict=True) if a != b) for y in other]
        for x in one
    ]
    return np.exp(-np.array(differ).reshape(len(one), len(other)) / length)


def estimated(records: Sequence[Record]) -> tuple[float, float]:
    """The most likely length, and the variance."""
    known, times = keys([record.config for record in records]), log_times(records)
    variance, off = float(np.var(times)), times - np.median(times)

    def likelihood(length: float) -> float:
        noisy = variance * covariance(known, known, length) + NOISE**2 * np.eye(len(known))
        return float(-off @ np.linalg.solve(noisy, off) - np.linalg.slogdet(noisy)[1])

    return max(LENGTHS, key=likelihood), variance


def improvements(
    records: Sequence[Record],
    pending: Sequence[Key],
    candidates: Sequence[Key],
    length: float,
    variance: float,
) -> Floats:
    """Expected improvements, straight from the formulas and in double precision."""
    known, times = keys([record.config for record in records]), log_times(records)
    mean = np.median(times)

    def posterior(after: Sequence[Key], times: Floats, of: Sequence[Key]) -> tuple[Floats, Floats]:
        noisy = variance * covariance(after, after, length) + NOISE**2 * np.eye(len(after))
        across = variance * covariance(of, after, length)
        explained = (across * np.linalg.solve(noisy, across.T).T).sum(axis=1)
        return mean + across @ np.linalg.solve(noisy, times - mean), variance - explained

    hoped, _ = posterior(known, times, pending)
    times = np.concatenate([times, hoped])
    expected, variances = posterior([*known, *pending], times, candidates)
    spreads = np.sqrt(variances)
    z = (times.min() - expected) / spreads
    below = np.array([0.5 * (1 + math.erf(value / math.sqrt(2))) for value in z])
    improvement: Floats = spreads * (z * below + np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi))
    return improvement


@pytest.mark.parametrize("growth", [1.0, math.inf])
def test_what_is_kept_between_surrogate_proposals_does_not_change_them(
    growth: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """growth: estimated anew with every proposal, or only with the first."""
    monkeypatch.setattr(surrogate, "GROWTH", growth)
    monkeypatch.setattr(surrogate, "_AT_ONCE", 1)
    model = Surrogate(SPACE)
    records = [tried(config, timed(by_many(config))) for config in DRAWN[:12]]
    tried_keys = keys([record.config for record in records])
    candidates = [key for key in keys(LEGAL.first(300) + DRAWN[12:]) if key not in tried_keys]
    waiting, candidates = candidates[:4], candidates[4:]
    length, variance = estimated(records)
    for turn in range(20):
        if growth == 1.0:
            length, variance = estimated(records)
        offered = candidates[: 150 + 8 * turn]
        chosen = model.best(records, keys(r.config for r in records), waiting, offered)
        assert chosen is not None
        expected = improvements(records, waiting, offered, length, variance)
        assert expected[offered.index(chosen)] >= 0.999 * expected.max(), turn
        candidates.remove(chosen)
        waiting.append(chosen)
        arrived = LEGAL.config(waiting.pop(0))
        records.append(tried(arrived, timed(by_many(arrived))))


def test_what_is_on_its_way_may_be_expected_to_be_the_best() -> None:
    """Each of six changes saves a tenth, and all six together are on their way. Three of them would
    beat all that was measured, but hardly what is on its way."""
    base, others, unlike = DRAWN[0], DRAWN[1:20], DRAWN[20:]
    changes = [
        {knob.name: next(value for value in knob.choices if value != base[knob.name])}
        for knob in SPACE.knobs[-6:]
    ]

    def changed(count: int) -> list[Config]:
        return [
            {name: value for change in [base, *some] for name, value in change.items()}
            for some in combinations(changes, count)
        ]

    records = [tried(config, timed(1.4)) for config in others]
    for count in range(3):
        records += [tried(config, timed(1.4 * 0.9**count)) for config in changed(count)]
    candidates = [*changed(3), *unlike]
    assert proposed(records, [], candidates) in changed(3)
    assert proposed(records, changed(6), candidates) in unlike


def test_other_records_are_learned_from_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """These leave more uncertain, so that what was computed before bounds nothing."""
    monkeypatch.setattr(surrogate, "_AT_ONCE", 1)
    model, candidates = Surrogate(SPACE), keys(LEGAL.first(300))
    alike = [tried(r.config, timed(2.5 - 0.01 * r.ratio)) for r in reversed(RECORDS)]
    model.best(alike, keys(r.config for r in alike), [], candidates)
    chosen = model.best(RECORDS, keys(r.config for r in RECORDS), [], candidates)
    assert chosen is not None
    expected = improvements(RECORDS, [], candidates, *estimated(RECORDS))
    assert expected[candidates.index(chosen)] >= 0.999 * expected.max()


def test_few_variances_are_computed_once_most_candidates_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed = 0
    original = surrogate._Process.spread

    def spread(self: surrogate._Process, agree: surrogate.Counts) -> Floats:
        nonlocal computed
        computed += len(agree)
        return original(self, agree)

    model, candidates = Surrogate(SPACE), keys(LEGAL.first(2000))
    model.best(RECORDS[:38], keys(r.config for r in RECORDS[:38]), [], candidates)
    monkeypatch.setattr(surrogate._Process, "spread", spread)
    model.best(RECORDS[:39], keys(r.config for r in RECORDS[:39]), [], candidates)
    assert 0 < computed <= len(candidates) / 4


def test_weights_that_are_too_many_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [WEIGHTS.get(knob.name, OTHER_WEIGHT) for knob in SPACE.knobs]
    assert Surrogate(SPACE)._weights == given
    monkeypatch.setattr(surrogate, "OTHER_WEIGHT", 40)
    large = [WEIGHTS.get(knob.name, 40) for knob in SPACE.knobs]
    kept = Surrogate(SPACE)._weights
    assert sum(large) > 255 >= sum(kept) > 200
    assert all(weight > 0 for weight in kept)
    for a, b in zip(sorted(range(len(large)), key=large.__getitem__), sorted(kept), strict=True):
        assert kept[a] == b
    assert proposed(RECORDS, [], DRAWN[:3]) in DRAWN[:3]
