"""The finalists of a search on a made-up cost, and its winner."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import pytest
from optuna.storages import BaseStorage, InMemoryStorage

from generator.kernels.geometry import Config
from generator.kernels.nvrtc import Compiled
from generator.kernels.strategies import is_deterministic, launches
from generator.kernels.variant import Variant, make_variant
from generator.problem import Problem
from generator.result import Result
from generator.search.budget import FINALISTS
from generator.search.choose_winner import choose
from generator.search.finals import (
    SHORTLIST,
    SHORTLIST_US,
    Final,
    _with_families,
    contenders,
    fastest_ineligible,
    hold_finals,
)
from generator.space.family import family_of
from generator.space.legal_configs import Values
from generator.studies.records import Record
from generator.studies.study_log import StudyLog, stored_winners
from tests.support.searches import DETERMINISTIC, of_families, ratio_of, records, search, won
from tests.support.synthetic import (
    FLOOR_US,
    LEGAL,
    PROBLEM,
    FakeEvaluator,
    FakePool,
    cost,
    make_winner,
    timed,
)

pytestmark = pytest.mark.usefixtures("quick_proposals")


def test_who_fails_the_last_check_gives_way_until_somebody_passes(storage: BaseStorage) -> None:
    class Strict(FakeEvaluator):
        asked: ClassVar[list[Config]] = []

        def confirm(self, problem: Problem, variant: Variant, result: Result) -> Result:
            self.asked.append(variant.config)
            if len(self.asked) <= FINALISTS + 1:
                return replace(result, outcome="wrong", note="planted")
            return replace(result, checks=(*result.checks, "last"))

    evaluator = Strict()
    winner = won(search(storage, evaluator, trials=30))
    assert winner.config == evaluator.asked[-1]
    assert winner.result.checks[-1] == "last"
    assert len(evaluator.asked) == len(set(map(repr, evaluator.asked))) == FINALISTS + 2
    assert len(evaluator.finalists) == 2  # all of the first failed


def test_the_winner_is_the_best_of_the_finals(storage: BaseStorage) -> None:
    evaluator = FakeEvaluator()
    winner = won(search(storage, evaluator, trials=60))
    [finalists] = evaluator.finalists
    deterministic = [c for c in finalists if is_deterministic(c)]
    feasible = [record for record in records(storage) if record.feasible]
    best = min(feasible, key=lambda record: (record.ratio, LEGAL.rank(record.config)))
    assert len(deterministic) == FINALISTS
    assert {LEGAL.key(best.config)} <= {LEGAL.key(config) for config in deterministic}
    assert winner.result.ratio <= 1.01 * min(map(ratio_of, deterministic))
    assert {entry.variant for entry in winner.tied} <= {
        make_variant(config, PROBLEM).id for config in deterministic
    }
    assert winner.variant in {entry.variant for entry in winner.tied}


class Shortlister(FakeEvaluator):
    """Trials scatter by several per cent, and only side by side the truth is seen."""

    def __init__(self, clean: bool = True) -> None:
        super().__init__(final=lambda variant: timed(cost(variant)))
        self.clean = clean
        self.shortlisted: list[list[Config]] = []
        noise = random.Random(3)
        self.cost = lambda variant: cost(variant) * (1 + abs(noise.gauss(0, 0.03)))

    def shortlist(
        self,
        problem: Problem,
        entries: Sequence[tuple[Variant, Compiled]],
        blocks: int | None = None,
    ) -> list[float]:
        assert blocks is None, "as many as the evaluator needs to rank them"
        self.shortlisted.append([variant.config for variant, _ in entries])
        return [cost(variant) for variant, _ in entries] if self.clean else []


@pytest.fixture
def any_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finals whose places depend on times alone."""
    monkeypatch.setattr("generator.search.finals.FAMILIES", 1)


@pytest.mark.usefixtures("any_family")
def test_who_is_among_the_best_is_found_side_by_side(storage: BaseStorage) -> None:
    evaluator = Shortlister()
    search(storage, evaluator, trials=60)
    [shortlisted], [finalists] = evaluator.shortlisted, evaluator.finalists
    assert FINALISTS < len(shortlisted) <= SHORTLIST
    assert all(is_deterministic(config) for config in shortlisted)
    best = sorted(shortlisted, key=ratio_of)[:FINALISTS]
    called = [LEGAL.key(c) for c in finalists if is_deterministic(c)][-FINALISTS:]
    assert called == [LEGAL.key(config) for config in best]
    by_trial = [LEGAL.key(config) for config in shortlisted[:FINALISTS]]
    assert called != by_trial, "the trials alone would have called up others"


@pytest.mark.usefixtures("any_family")
def test_the_best_trial_is_in_the_finals_beside_the_best_of_the_shortlist(
    storage: BaseStorage,
) -> None:
    """One slow variant had a lucky moment."""
    evaluator = Shortlister()
    scattered = evaluator.cost

    def lucky(variant: Variant) -> float:
        slow = variant.determinism != "none" and cost(variant) > 1.3
        evaluator.cost = scattered if slow else lucky
        return 0.9 if slow else scattered(variant)

    evaluator.cost = lucky
    search(storage, evaluator, trials=60)
    [shortlisted], [finalists] = evaluator.shortlisted, evaluator.finalists
    (best,) = (record.config for record in records(storage) if record.ratio == 0.9)
    first, *called = [LEGAL.key(c) for c in finalists if is_deterministic(c)]
    assert first == LEGAL.key(best)
    assert called == [LEGAL.key(config) for config in sorted(shortlisted, key=ratio_of)[:FINALISTS]]


@pytest.mark.usefixtures("any_family")
def test_without_clean_times_side_by_side_the_trials_decide(storage: BaseStorage) -> None:
    evaluator = Shortlister(clean=False)
    search(storage, evaluator, trials=60)
    [shortlisted], [finalists] = evaluator.shortlisted, evaluator.finalists
    called = [LEGAL.key(c) for c in finalists if is_deterministic(c)]
    assert called == [LEGAL.key(config) for config in shortlisted[:FINALISTS]]


def test_a_gpu_where_all_ratios_are_small_does_not_fill_the_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The best of each GPU are timed beside those of the others."""
    monkeypatch.setattr("generator.search.finals.SHORTLIST", 6)
    configs = of_families(16)
    every = [record(config, 1.2 + place / 100, str(place)) for place, config in enumerate(configs)]
    for place, one in enumerate(every):
        gpu = {"gpu": "first" if place < 8 else "second"}
        every[place] = replace(one, result=replace(one.result, extra=gpu))
    evaluator = Shortlister()
    hold_finals(LEGAL, FakePool(), evaluator, every, None, 3)
    (shortlisted,) = evaluator.shortlisted
    assert all(config in shortlisted for config in (*configs[:3], *configs[8:11]))
    assert len(shortlisted) == 6


def test_few_that_take_long_are_not_shortlisted(storage: BaseStorage) -> None:
    evaluator = Shortlister()
    slow = Result("ok", SHORTLIST_US / FINALISTS, SHORTLIST_US / 10, 1.3, "verified")
    evaluator._result = lambda variant: slow  # type: ignore[method-assign]
    search(storage, evaluator, trials=40)
    assert evaluator.shortlisted == []


@pytest.mark.parametrize("lucky", [False, True], ids=["caught", "bits that happen to repeat"])
def test_a_nondeterministic_variant_planted_fastest_never_wins(
    storage: BaseStorage, lucky: bool
) -> None:
    def planted(variant: Variant) -> float:
        return 1.0 if variant.determinism == "none" else cost(variant)

    winner = won(search(storage, FakeEvaluator(planted, lucky=lucky), trials=60))
    assert is_deterministic(winner.config)
    assert all(is_deterministic(entry.config) for entry in winner.tied)
    fastest = winner.fastest_nondeterministic
    assert fastest is not None
    assert not is_deterministic(fastest.config)
    assert fastest.ratio == 1.0
    assert winner.overhead_of_determinism == winner.result.ratio


def test_who_fails_in_the_finals_does_not_win(storage: BaseStorage) -> None:
    before = FakeEvaluator()
    search(InMemoryStorage(), before, trials=60)
    (first,) = before.finalists

    def ladder(variant: Variant) -> Result | None:
        bad = variant.config in first
        return timed(0.5, "nondeterministic", "refuted") if bad else None

    evaluator = FakeEvaluator(final=ladder)
    winner = won(search(storage, evaluator, trials=60))
    assert winner.config not in first
    assert len(evaluator.finalists) > 1, "the next best were to be called up"
    again = FakeEvaluator(final=ladder)
    assert search(storage, again, trials=60) == winner
    assert again.finalists == []


def test_no_winner_when_nobody_passes(storage: BaseStorage) -> None:
    evaluator = FakeEvaluator(final=lambda variant: Result("crashed", note="planted"))
    assert search(storage, evaluator, trials=30) is None
    assert stored_winners(storage) == []


def test_ties_go_to_the_first_in_the_order_of_the_space() -> None:
    one, two, three = DETERMINISTIC[:3]
    finals = [(three, timed(1.100)), (two, timed(1.105)), (one, timed(1.106))]
    for order in (finals, finals[::-1], [finals[1], finals[2], finals[0]]):
        choice = choose(order, LEGAL.rank, None)
        assert choice is not None
        assert order[choice.winner][0] == two, "the first knob with a difference is the strategy"
        assert [order[place][0] for place in choice.tied] == [two, three]


def test_rank_compares_knob_by_knob_in_file_order() -> None:
    config = DETERMINISTIC[0]
    later = {**config, "store_hint": "streaming"}
    earlier_knob = {**config, "grid": "even"}
    assert LEGAL.rank(config) < LEGAL.rank(later) < LEGAL.rank(earlier_knob)


@pytest.mark.parametrize(
    ("ratio", "stays"),
    [(1.1, True), (1.1 * 1.0099, True), (1.1 * 1.0101, False), (1.05, True)],
)
def test_the_incumbent_stays_unless_beaten_by_more_than_one_percent(
    ratio: float, stays: bool
) -> None:
    challenger, incumbent = DETERMINISTIC[:2]
    finals = [(challenger, timed(1.1)), (incumbent, timed(ratio))]
    choice = choose(finals, LEGAL.rank, incumbent)
    assert choice is not None
    assert (finals[choice.winner][0] == incumbent) is stays
    assert "incumbent" in choice.reason


@pytest.mark.parametrize("ratio", [1.095, 1.12])
def test_an_incumbent_of_two_launches_gives_way_to_as_fast_a_kernel_of_one(ratio: float) -> None:
    two = next(config for config in DETERMINISTIC if launches(config) == 2)
    one = next(config for config in DETERMINISTIC if launches(config) == 1)
    finals = [(two, timed(1.1)), (one, timed(ratio))]
    choice = choose(finals, LEGAL.rank, two)
    assert choice is not None
    assert (finals[choice.winner][0] == one) is (ratio < 1.11)
    # The other way round it stays: a second launch is never worth a tie.
    choice = choose(finals, LEGAL.rank, one)
    assert choice is not None
    assert (finals[choice.winner][0] == one) is (ratio < 1.11)


def test_ties_go_to_one_launch_before_the_order_of_the_space() -> None:
    finals = [(config, timed(1.1)) for config in DETERMINISTIC]
    rank = {repr(config): (launches(config) != 2,) for config, _ in finals}
    choice = choose(finals, lambda config: rank[repr(config)], None)
    assert choice is not None
    assert launches(finals[choice.winner][0]) == 1
    assert sorted(choice.tied) == list(range(len(finals)))


def test_an_incumbent_that_fails_is_replaced() -> None:
    challenger, incumbent = DETERMINISTIC[:2]
    failed = timed(1.0, "nondeterministic", "refuted")
    finals = [(incumbent, failed), (challenger, timed(1.5))]
    choice = choose(finals, LEGAL.rank, incumbent)
    assert choice is not None
    assert choice.winner == 1
    assert "incumbent failed in the finals (nondeterministic)" in choice.reason


def test_the_stored_incumbent_takes_part_and_stays_on_a_tie(storage: BaseStorage) -> None:
    def flat(variant: Variant) -> float:
        return 1.2 + 0.001 * (cost(variant) - 1)

    first = won(search(storage, FakeEvaluator(flat), trials=30))
    evaluator, newer = FakeEvaluator(flat), FakePool(version="other machine code")
    again = won(search(storage, evaluator, trials=30, pool=newer, seed=9))
    assert again.date >= first.date
    assert len(evaluator.evaluated) == 30
    assert dict(first.config) in evaluator.finalists[0]
    assert again.config == first.config
    assert again.reason == "the incumbent: not beaten by more than 1 %"


def test_an_incumbent_is_in_the_finals_however_slow(storage: BaseStorage) -> None:
    slow = max(DETERMINISTIC, key=ratio_of)
    evaluator = FakeEvaluator()
    winner = won(search(storage, evaluator, trials=60, known_winners=[make_winner(slow)]))
    assert slow in evaluator.finalists[0]
    assert winner.reason.startswith("beat the incumbent by ")


def test_a_predicted_incumbent_has_no_rights_among_measured_ones(storage: BaseStorage) -> None:
    slow = max(DETERMINISTIC, key=ratio_of)
    evaluator = FakeEvaluator(lambda variant: 1.2)
    predicted = make_winner(slow, evidence="predicted")
    winner = won(search(storage, evaluator, trials=30, known_winners=[predicted]))
    assert "incumbent" not in winner.reason


def test_an_illegal_incumbent_is_a_start_and_no_finalist(storage: BaseStorage) -> None:
    stale = {**DETERMINISTIC[0], "register_cap": 40}  # would run, but a rule rejects it
    assert not LEGAL.is_legal(stale)
    evaluator = FakeEvaluator()
    search(storage, evaluator, trials=30, known_winners=[make_winner(stale)])
    assert stale not in evaluator.finalists[0]
    assert evaluator.evaluated[0]["strategy"] == stale["strategy"]


def test_the_newest_winner_is_the_incumbent(storage: BaseStorage) -> None:
    """The order in which the studies were stored does not matter."""
    old, new = sorted(DETERMINISTIC, key=ratio_of)[-2:]
    for config, month in ((new, "02"), (old, "01")):
        winner = make_winner(config, date=f"2026-{month}-01T00:00:00+00:00")
        StudyLog(storage, f"{PROBLEM}@h200-132sm:measured:{month}").save_finals(winner, [], 1, {})
    assert [winner.config for winner in stored_winners(storage)] == [old, new]
    evaluator = FakeEvaluator()
    search(storage, evaluator, trials=40)
    assert new in evaluator.finalists[0]
    assert old not in evaluator.finalists[0]


def record(config: Config, ratio: float, identity: str = "", outcome: str = "ok") -> Record:
    variant = make_variant(config, PROBLEM)
    return Record(config, variant.id, timed(ratio, outcome), "seed", 1.0, identity=identity)


def held(records: list[Record], pool: FakePool | None = None) -> list[Config]:
    """Return who takes part in the finals of these records."""
    evaluator = FakeEvaluator()
    hold_finals(LEGAL, pool or FakePool(), evaluator, records, None, 6)
    return list(evaluator.finalists[0])


@pytest.mark.parametrize("second", [1.1, 3.0])
def test_a_noisy_record_counts_by_its_second_measurement(second: float) -> None:
    """The better of both would favour what was disturbed. Its floor says nothing of the others."""
    configs = of_families(8)
    every = [record(config, 1.2 + place / 100, str(place)) for place, config in enumerate(configs)]
    every[0] = replace(every[0], result=replace(timed(1.0, floor_us=FLOOR_US / 2), noisy=True))
    evaluator = FakeEvaluator(lambda variant: second if variant.config == configs[0] else 1.5)
    hold_finals(LEGAL, FakePool(), evaluator, every, None, 3)
    assert evaluator.evaluated == configs[:1]
    assert (configs[0] in evaluator.finalists[0]) is (second < 1.2)


def test_noisy_records_of_one_machine_code_are_measured_again_once() -> None:
    every = [record(config, 1.2, "one") for config in of_families(3)]
    every = [replace(one, result=replace(one.result, noisy=True)) for one in every]
    evaluator = FakeEvaluator()
    hold_finals(LEGAL, FakePool(), evaluator, every, None, 3)
    assert len(evaluator.evaluated) == 1


def test_the_fastest_that_may_not_win_is_timed_beside_the_winner() -> None:
    free = [c for c in LEGAL.reduction_kinds if not is_deterministic(c)][:2]
    assert len(free) == 2
    sound = record(DETERMINISTIC[0], 1.2, "0")
    slow, fast = (
        record(c, r, str(r), "nondeterministic") for c, r in zip(free, (1.3, 1.1), strict=True)
    )
    for order in ([slow, fast, sound], [fast, sound, slow]):
        assert held(order) == [fast.config, sound.config]
    pool = FakePool()
    finals = [
        Final(variant, pool.submit(variant).result(), found.result)
        for found in (slow, fast, sound)
        for variant in [make_variant(found.config, PROBLEM)]
    ]
    told = fastest_ineligible(finals)
    assert told is not None and told.variant == fast.variant
    untimed = replace(finals[1], result=Result("wrong", note="dx is off"))
    told = fastest_ineligible([untimed, finals[0], finals[2]])
    assert told is not None and told.variant == slow.variant
    assert fastest_ineligible([untimed, finals[2]]) is None


def test_one_that_may_not_win_is_not_chosen_for_its_own_slow_floor() -> None:
    free = [c for c in LEGAL.reduction_kinds if not is_deterministic(c)][:2]
    sound = [record(config, 1.2, str(n)) for n, config in enumerate(DETERMINISTIC[:3])]
    fast, slow = (record(config, 1.1, repr(config), "nondeterministic") for config in free)
    slow = replace(slow, result=timed(1.0, "nondeterministic", floor_us=1.2 * FLOOR_US))
    assert held([slow, fast, *sound])[0] == fast.config


def variations(config: Config, count: int) -> list[Values]:
    """Legal configs of the same family, the given one first."""
    found = {LEGAL.key(config): dict(config)}
    for start in [config, *LEGAL.around(config, random.Random(1))]:
        for near in (dict(start), *LEGAL.around(start, random.Random(1))):
            if family_of(near) == family_of(config):
                found.setdefault(LEGAL.key(near), near)
        if len(found) >= count:
            break
    assert len(found) >= count
    return list(found.values())[:count]


@pytest.mark.parametrize("others", [0, 1, 2, 3])
def test_three_families_are_in_the_finals_where_there_are_so_many(others: int) -> None:
    """However far the best of the second and the third are behind many of the first."""
    one, *rest = of_families(1 + others)
    alike = variations(one, 9)
    fast = [record(config, 1.1 + place / 1000, f"a{place}") for place, config in enumerate(alike)]
    slow = [record(config, 1.3 + place / 100, f"b{place}") for place, config in enumerate(rest)]
    kept = min(others, 2)
    assert held([*slow, *fast]) == [*alike[: 6 - kept], *rest[:kept]]


def test_another_family_takes_no_place_from_the_best_of_one_launch() -> None:
    """The operation is short, where such a kernel may win though it is slower."""
    separate = [config for config in of_families(30) if launches(config) == 2]
    one, second, third = separate[:3]
    ranked = sorted(variations(one, 20), key=lambda config: launches(config) == 1)
    two = sum(launches(config) == 2 for config in ranked)
    size = two + 2
    assert two > 2 and len(ranked) >= size
    finalists, others = ranked[:size], [*ranked[size:], second, third]
    found = _with_families([*finalists, *others], size, one_launch=True)
    assert found[:size] == [*finalists[: two - 2], *finalists[two:], second, third]
    assert sorted(map(repr, found)) == sorted(map(repr, [*finalists, *others]))
    found = _with_families([*finalists, *others], size, one_launch=False)
    assert found[:size] == [*finalists[:two], second, third]


def test_the_first_of_the_shortlist_stays_a_finalist() -> None:
    """Though it alone has two launches, where others of its family have one."""
    separate = next(config for config in of_families(30) if launches(config) == 2)
    alike = variations(separate, 100)
    ones = [config for config in alike if launches(config) == 1][:6]
    others = [config for config in of_families(30) if family_of(config) != family_of(separate)][:2]
    assert len(ones) == 6 and len(others) == 2
    found = _with_families([separate, *ones, *others], 7, one_launch=True)
    assert found[:7] == [separate, *ones[:4], *others]


def test_of_equal_machine_codes_the_first_of_the_space_stands_for_all() -> None:
    first, second = sorted(DETERMINISTIC[:2], key=LEGAL.rank)
    for tried in ((first, second), (second, first)):
        found = contenders(LEGAL, [record(config, 1.2, "same") for config in tried])
        assert [r.config for r in found] == [first]


def test_a_variant_that_no_longer_fits_is_no_finalist() -> None:
    fits, spills = DETERMINISTIC[:2]
    found = [record(spills, 1.1, "a"), record(fits, 1.2, "b")]
    assert held(found, FakePool(spilling=lambda config: config == spills)) == [fits]
