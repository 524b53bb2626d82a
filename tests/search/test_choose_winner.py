"""A launch counts where the host takes longer for a call than the GPU, and not elsewhere."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from generator.emulate.evaluator import EmulatingPredictor
from generator.kernels.geometry import Config
from generator.kernels.resource_gate import refuse
from generator.kernels.strategies import is_deterministic, launches
from generator.kernels.variant import Variant, make_variant
from generator.report.reason import passed_over, reason
from generator.result import Result
from generator.search import choose_winner, finals
from generator.search.choose_winner import (
    HOST_US,
    INCUMBENT_TIE,
    LAUNCH_US,
    TIE,
    Choice,
    choose,
    preference_of,
    slack,
)
from generator.search.finals import ONE_LAUNCH_PLACES, hold_finals
from generator.space.legal_configs import LegalConfigs
from generator.space.load import load_space, load_space_once, space_file
from generator.studies.records import INCUMBENT_STAYS, Record
from generator.target import find_target
from tests.support.committed import committed_studies
from tests.support.synthetic import FLOOR_US, PROBLEM, TARGET, FakeEvaluator, FakePool, timed

LEGAL = LegalConfigs(load_space(), PROBLEM, TARGET)
DETERMINISTIC = [config for config in LEGAL.reduction_kinds if is_deterministic(config)]
TWO = next(config for config in DETERMINISTIC if launches(config) == 2)
ONE, OTHER = [config for config in DETERMINISTIC if launches(config) == 1][:2]
SHORT_US, LONG_US = HOST_US / 2, HOST_US * 2


def drawn(count: int) -> dict[int, list[Config]]:
    """`count` different configs of one launch, and as many of two, each a cubin of its own that may
    run."""
    rng, found, pool = random.Random(7), dict[int, dict[str, Config]]({1: {}, 2: {}}), FakePool()
    while any(len(configs) < count for configs in found.values()):
        config = LEGAL.draw(rng, ())
        assert config is not None
        configs, variant = found[launches(config)], make_variant(config, PROBLEM)
        compiled = pool.result(variant, pool.submit(variant))
        if len(configs) < count and refuse(variant, compiled, PROBLEM, TARGET) is None:
            configs[variant.id] = config
    return {number: list(configs.values()) for number, configs in found.items()}


DRAWN = drawn(10)


def took(us: float) -> Result:
    return timed(us / FLOOR_US)


def chosen(
    times: Sequence[tuple[Config, float]], incumbent: Config | None = None
) -> tuple[Config, Choice]:
    choice = choose([(config, took(us)) for config, us in times], LEGAL.rank, incumbent)
    assert choice is not None
    assert choice.winner in choice.tied
    return times[choice.winner][0], choice


# ---- The winner ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("us", "slower", "wins"),
    [
        (HOST_US - 0.01, LAUNCH_US - 0.001, True),
        (HOST_US - 0.01, LAUNCH_US + 0.001, False),
        (HOST_US, TIE * HOST_US - 0.001, True),
        (HOST_US, TIE * HOST_US + 0.001, False),
    ],
)
def test_a_launch_less_makes_up_for_a_part_of_a_microsecond_where_the_host_is_slower(
    us: float, slower: float, wins: bool
) -> None:
    times = [(TWO, us), (ONE, us + slower)]
    for order in (times, times[::-1]):
        winner, choice = chosen(order)
        assert winner == (ONE if wins else TWO)
        assert len(choice.tied) == 1 + wins
    # Nobody is forgiven a launch more, or as many.
    for config in (TWO, OTHER):
        winner, choice = chosen([(ONE, us), (config, us + max(slower, us * TIE + 0.001))])
        assert winner == ONE
        assert len(choice.tied) == 1


@pytest.mark.parametrize("us", [SHORT_US, LONG_US])
def test_an_incumbent_of_one_launch_stays_within_the_slack(us: float) -> None:
    allowed = max(INCUMBENT_TIE * us, LAUNCH_US * (us < HOST_US))
    winner, choice = chosen([(TWO, us), (ONE, us + allowed - 0.001)], ONE)
    assert winner == ONE
    assert choice.reason.startswith("the incumbent: ")
    winner, choice = chosen([(TWO, us), (ONE, us + allowed + 0.001)], ONE)
    assert winner == TWO
    assert choice.reason.startswith("beat the incumbent by ")


@pytest.mark.parametrize("us", [SHORT_US, LONG_US])
def test_an_incumbent_of_two_launches_gives_way_within_the_slack(us: float) -> None:
    allowed = max(TIE * us, LAUNCH_US * (us < HOST_US))
    winner, choice = chosen([(TWO, us), (ONE, us + allowed - 0.001)], TWO)
    assert winner == ONE
    assert "in one launch instead of two" in choice.reason
    winner, choice = chosen([(TWO, us), (ONE, us + allowed + 0.001)], TWO)
    assert winner == TWO
    assert choice.reason.startswith("the incumbent: ")


def test_a_launch_less_is_the_reason_where_the_incumbent_would_have_stayed_otherwise() -> None:
    for behind in (0.992, 1.0, 1.003):
        winner, choice = chosen([(TWO, LONG_US), (ONE, LONG_US * behind)], TWO)
        assert winner == ONE
        assert choice.reason.startswith("counts as fast as the incumbent, in one launch")
        assert "beat the incumbent" not in choice.reason


def test_of_an_unknown_time_only_ratios_count() -> None:
    assert slack(Result("ok", ratio=1.1), ONE, TWO, TIE) == TIE


@settings(max_examples=300)
@given(
    st.floats(1.0, 2 * HOST_US),
    st.lists(st.tuples(st.sampled_from([1, 2]), st.floats(0.0, 0.5)), min_size=1, max_size=8),
    st.none() | st.integers(0, 7),
)
def test_winner_is_as_fast_as_the_best_or_saves_what_makes_up_for_it(
    us: float, entries: list[tuple[int, float]], place: int | None
) -> None:
    """Nobody who would do so with fewer launches has been passed over."""
    times = [(DRAWN[number][index], us + slower) for index, (number, slower) in enumerate(entries)]
    incumbent = times[place][0] if place is not None and place < len(times) else None
    winner, choice = chosen(times, incumbent)
    first = min(range(len(times)), key=lambda index: times[index][1])
    best, least = times[first]

    def behind(index: int, tie: float) -> float:
        """Microseconds by which it is too slow to be equal."""
        saves = launches(times[index][0]) < launches(best) and least < HOST_US
        return times[index][1] - least - max(tie * least, LAUNCH_US * saves)

    # An incumbent that stays widens the tie.
    tie = INCUMBENT_TIE if choice.reason.startswith(INCUMBENT_STAYS) else TIE
    assert all(behind(index, tie) < 1e-9 for index in choice.tied)
    equal = [config for index, (config, _) in enumerate(times) if behind(index, TIE) < -1e-9]
    assert all(launches(config) >= launches(winner) for config in equal)
    if incumbent and incumbent != winner:
        assert place not in choice.tied or launches(incumbent) > launches(winner)
    assert chosen(times, winner)[0] == winner, "who wins is replaced at the same times"


# ---- Who is in the finals ------------------------------------------------------------------------


def tried(configs: Sequence[Config], us: float) -> list[Record]:
    """Records in an order that says nothing: the first config takes `us`, each 1 % more."""
    records = [
        Record(config, "v", took(us * (1 + place / 100)), "tpe", 0.0, identity=str(place))
        for place, config in enumerate(configs)
    ]
    return random.Random(len(records)).sample(records, len(records))


def rounds(configs: Sequence[Config], us: float, size: int) -> list[list[dict[str, int | str]]]:
    """Return who is called up where nobody passes and all may be of one family."""
    evaluator = FakeEvaluator(final=lambda variant: Result("crashed", note="planted"))
    with patch.object(finals, "FAMILIES", 1):
        hold_finals(LEGAL, FakePool(), evaluator, tried(configs, us), None, size)
    return evaluator.finalists


@settings(max_examples=100)
@given(st.lists(st.sampled_from([1, 2]), min_size=1, max_size=len(DRAWN[1])), st.integers(1, 6))
def test_the_best_of_one_launch_have_places_in_the_finals_of_a_short_operation(
    numbers: list[int], size: int
) -> None:
    configs = [DRAWN[number][place] for place, number in enumerate(numbers)]
    places = min(ONE_LAUNCH_PLACES, size - 1)
    chosen = [config for config in configs if launches(config) == 1][:places]
    others = [config for config in configs if config not in chosen]
    first, *later = rounds(configs, HOST_US - 0.01, size)
    everyone = [config for entries in (first, *later) for config in entries]
    assert len(everyone) == len(configs), "none is lost or doubled"
    assert len(first) == min(size, len(configs))
    assert [config for config in everyone if config in chosen] == chosen
    assert [config for config in everyone if config not in chosen] == others
    assert all(config in first for config in (chosen + others)[:size])
    # Only the times count where the operation takes long.
    assert rounds(configs, HOST_US, size) == [
        configs[start : start + size] for start in range(0, len(configs), size)
    ]


@pytest.mark.parametrize(("floor_us", "number"), [(HOST_US / 2, 1), (HOST_US * 2, 2)])
def test_one_launch_wins_a_short_operation_although_many_of_two_are_faster(
    floor_us: float, number: int
) -> None:
    def ladder(variant: Variant) -> Result:
        return timed(1.02 if launches(variant.config) == 1 else 1.0, floor_us=floor_us)

    records = tried([*DRAWN[2], *DRAWN[1]], floor_us)
    finals = hold_finals(LEGAL, FakePool(), FakeEvaluator(final=ladder), records, None, 6)
    found = [(final.variant.config, final.result) for final in finals]
    choice = choose(found, LEGAL.rank, None)
    assert choice is not None
    assert launches(found[choice.winner][0]) == number


def test_reasons_say_who_was_how_far_behind() -> None:
    us = SHORT_US
    behind = f"{LAUNCH_US / us - 0.01 / us:.1%} behind the fastest, in one launch instead of two"
    slow = us + LAUNCH_US - 0.01
    assert chosen([(TWO, us), (ONE, slow)])[1].reason == behind
    assert chosen([(TWO, us), (ONE, slow)], ONE)[1].reason == f"the incumbent: {behind}"
    # An incumbent that is faster than the winner was not beaten by it.
    between = us * (1 + 2 * TIE)
    reason = chosen([(TWO, us), (OTHER, between), (ONE, between + 0.05)], OTHER)[1].reason
    assert not reason.startswith("beat the incumbent")


GPUS = [pytest.param("h200", marks=pytest.mark.slow), "h100", "gb200"]


@pytest.mark.parametrize("gpu", GPUS)
def test_committed_winners_stay_when_their_finals_are_asked_again(gpu: str) -> None:
    """They stay, as incumbents, also where today's rules would choose others among the same
    times."""
    for study in committed_studies(gpu):
        if study.winner is None:
            continue
        target = replace(find_target(gpu), sms=study.sms)
        space = load_space_once(space_file(study.problem.operation))
        legal = LegalConfigs(space, study.problem, target)
        predicted = study.evidence == "predicted"
        preference = preference_of(EmulatingPredictor(target), study.problem) if predicted else None
        choice = choose(study.finals, legal.rank, study.winner.config, preference)
        assert choice is not None
        assert study.finals[choice.winner][0] == study.winner.config, study.name


BEFORE = 0.01
"""TIE of the older studies, and that of their incumbents."""
UNDER_BEFORE = {"h100": 16, "h200": 3}
"""The number of winners that were no incumbents and are not what TIE of today chooses."""


@pytest.mark.parametrize("gpu", GPUS[:2])
def test_committed_winners_are_what_the_rule_of_their_time_chose(
    monkeypatch: pytest.MonkeyPatch, gpu: str
) -> None:
    """The incumbent of that time, which the reason tells, is the winner itself, or one that did not
    win. Where today's rule passes over a faster finalist, the reason as it is printed names it."""
    older = 0
    for study in committed_studies(gpu):
        winner, rank = study.winner, None
        if winner is None or study.evidence == "predicted":
            continue
        rank = LegalConfigs(
            load_space_once(space_file(study.problem.operation)), study.problem, find_target(gpu)
        ).rank
        stayed = winner.reason.startswith(INCUMBENT_STAYS)
        incumbent = winner.config if stayed else None

        def wins(incumbent: Any, study: Any = study, rank: Any = rank) -> bool:
            choice = choose(study.finals, rank, incumbent)
            assert choice is not None
            return bool(study.finals[choice.winner][0] == study.winner.config)

        over = passed_over(study)
        if over is not None:
            assert not wins(None) and over[1] > 0
            assert reason(study) == (
                f"{winner.reason}; kept, though finalist {over[0]} was {over[1]:.2%} faster"
            )
        if not wins(incumbent):
            older += 1
            assert over is not None and over[1] < BEFORE, study.name
            with monkeypatch.context() as before:
                before.setattr(choose_winner, "TIE", BEFORE)
                assert wins(incumbent), study.name
    assert older == UNDER_BEFORE[gpu]
