"""Questions about the legal configs of a problem, beside those of the sampler's tests."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from generator.kernels.strategies import REDUCTION_KNOBS
from generator.kernels.variant import Variant
from generator.problem import Problem
from generator.space.expressions import Names
from generator.space.legal_configs import LegalConfigs
from generator.space.load import load_space_once, space_file
from tests.support.emulator import legal
from tests.support.synthetic import LEGAL, PROBLEM, SPACE, TARGET


def test_a_config_with_a_knob_that_means_nothing_is_not_allowed() -> None:
    """Two configs that differ in it would be one kernel under two names."""
    one = SPACE.sample(PROBLEM, TARGET, random.Random(1), {"pipeline": "direct"})
    assert LEGAL.is_legal(one)
    for knob in SPACE.knobs:
        for value in knob.choices:
            other = {**one, knob.name: value}
            normal = SPACE.normalize(other, PROBLEM, TARGET)
            if normal != other:
                assert not LEGAL.is_legal(other), (knob.name, value)
    stages = next(knob for knob in SPACE.knobs if knob.name == "stages")
    meaningless = next(value for value in stages.choices if value != one["stages"])
    assert not LEGAL.is_legal({**one, "stages": meaningless})


def test_registers_that_a_config_may_use_are_those_of_its_share_of_an_sm() -> None:
    names = Names(PROBLEM, TARGET, True)
    config = LEGAL.first(1)[0]
    names.update({**config, "threads_per_row": 128, "rows_per_cta": 2, "register_cap": 0})
    budgets = []
    for ctas in (1, 2, 4):
        names["ctas_per_sm"] = ctas
        budgets.append(names["register_budget"])
    assert budgets == [255, 65536 // 512 // 8 * 8, 65536 // 1024 // 8 * 8]
    names["register_cap"] = 40
    assert names["register_budget"] == 40


WINDOW_KNOBS = {
    **{"spare_sms": 0, "ctas_per_sm": 1, "cluster": 1, "rows_per_cta": 1, "rows_in_flight": 1},
    "threads_per_row": 128,
}


@pytest.mark.parametrize(
    ("changed", "rows"),
    [
        ({}, 132),
        ({"ctas_per_sm": 3, "rows_per_cta": 4, "rows_in_flight": 2}, 132 * 3 * 4 * 2),
        ({"cluster": 2}, 66),  # pairs, with a whole row each
        ({"cluster": 8, "spare_sms": 12, "ctas_per_sm": 3}, 120 * 3 // 8),
        ({"threads_per_row": 8, "rows_in_flight": 2}, 132 * 4 * 2),  # a warp has 4 rows abreast
        ({"threads_per_row": 32, "stages": 6}, 132),  # rows that are only loaded do not count
    ],
)
def test_a_window_is_the_whole_rows_that_a_full_grid_works_on(
    changed: dict[str, int], rows: int
) -> None:
    config = {**LEGAL.first(1)[0], **WINDOW_KNOBS, **changed}
    for shape, row_bytes in (("4096x1024:bf16", 2048), ("64x1024:fp32", 4096)):
        legal = LegalConfigs(SPACE, Problem.parse(shape), TARGET)
        assert legal.window(config) == rows * row_bytes


def test_a_value_that_the_space_does_not_have_is_not_allowed() -> None:
    """A winner of another space may have one that no rule looks at."""
    config = LEGAL.first(1)[0]
    assert LEGAL.is_legal(config)
    for knob in SPACE.knobs:
        other: int | str = "unheard-of" if isinstance(knob.values[0], str) else 12345
        assert not LEGAL.is_legal({**config, knob.name: other})
        assert not LEGAL.is_legal({k: v for k, v in config.items() if k != knob.name})


def test_held_knobs_keep_their_values() -> None:
    rng = random.Random(2)
    found = 0
    for _ in range(12):
        config = LEGAL.draw(rng, ())
        assert config is not None
        for kind in LEGAL.reduction_kinds:
            wanted = {name: kind[name] for name in REDUCTION_KNOBS}
            near = LEGAL.nearest({**config, **wanted}, rng, held=REDUCTION_KNOBS)
            if near is not None:
                found += 1
                assert {name: near[name] for name in REDUCTION_KNOBS} == wanted
    assert found > 20


def test_a_held_knob_stays_where_another_value_is_nearer() -> None:
    rng = random.Random(3)
    repaired = 0
    knobs = {knob.name: knob.choices for knob in SPACE.knobs}
    for name in ("threads_per_row", "rows_per_cta", "cluster", "stages"):
        for _ in range(12):
            config = LEGAL.draw(rng, ())
            assert config is not None
            for value in knobs[name]:
                wanted = {**config, name: value}
                if SPACE.normalize(wanted, LEGAL.problem, LEGAL.target)[name] != value:
                    continue  # it means nothing there
                near = LEGAL.nearest(wanted, rng, held=(name,))
                free = LEGAL.nearest(wanted, rng)
                repaired += near is not None and free is not None and free[name] != value
                assert near is None or near[name] == value or near["pipeline"] != wanted["pipeline"]
    assert repaired > 3


def test_a_recorded_config_gets_what_the_space_says_of_a_later_knob() -> None:
    """A neutral value changes nothing where the knob means something; elsewhere all configs have
    the one value of the space."""
    knobs = [
        replace(knob, otherwise="early") if knob.name == "arrival" else knob for knob in SPACE.knobs
    ]
    legal = LegalConfigs(replace(SPACE, knobs=tuple(knobs)), PROBLEM, TARGET)
    for strategy, arrival in (("mailbox", "late"), ("column_slices", "early")):
        config = legal.space.sample(PROBLEM, TARGET, random.Random(4), {"strategy": strategy})
        wanted = {**config, "arrival": arrival}
        recorded = {name: value for name, value in config.items() if name != "arrival"}
        assert legal.today(recorded) == legal.complete(recorded) == wanted


def test_a_recorded_config_keeps_what_no_knob_of_today_explains() -> None:
    """It is of another kernel than the one that today's knobs would make of it."""
    config = LEGAL.space.sample(PROBLEM, TARGET, random.Random(4))
    unknown, other = {**config, "prefetch": 2}, {**config, "groups_ahead": 4}
    for recorded in (unknown, other):
        assert LEGAL.complete(recorded) == recorded
        assert LEGAL.today(recorded) is None
    neutral = {**config, "groups_ahead": 0}
    assert LEGAL.complete(neutral) == LEGAL.today(neutral) == config


@pytest.mark.parametrize(
    ("columns", "served"),
    [
        (5120, {160, 320}),
        (7168, {224, 448}),
        (2304, {288}),
        (5376, {224}),
        (4096, set()),
        (4095, {160, 224, 288, 320, 448}),  # no whole vectors
    ],
)
def test_numbers_of_threads_for_few_lengths_are_searched_where_they_share_rows_evenly(
    columns: int, served: set[int]
) -> None:
    problem = Problem.parse(f"16384x{columns}:bf16")
    few = {160, 224, 288, 320, 448}
    found = {
        threads
        for threads in few
        if isinstance(legal(problem, TARGET, pipeline="direct", threads_per_row=threads), Variant)
    }
    assert found == served


@pytest.mark.parametrize(("rows", "legal_so"), [(264, True), (263, False)])
def test_a_wave_of_ctas_may_have_exactly_one_batch_each(rows: int, legal_so: bool) -> None:
    """Two CTAs on each of 132 SMs have a row each, or there is one row too few."""
    problem = Problem.parse(f"{rows}x2048:bf16")
    wanted = {"strategy": "column_slices", "pipeline": "direct", "threads_per_row": 128}
    config = SPACE.normalize({**wanted, "ctas_per_sm": 2}, problem, TARGET)
    rejection = SPACE.reject(config, problem, TARGET)
    assert (rejection is None) == legal_so, rejection
    if not legal_so:
        assert str(rejection).startswith("rows_enough: 263 rows make 263 batches, too few for 264")


def test_a_draw_for_wide_rows_tries_little_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few configs are legal. A walk that tried all values of knobs that no rule in the way depends
    on would take ten times as many."""
    problem = Problem.parse("layernorm_backward:4096x65536:bf16")
    wide = LegalConfigs(load_space_once(space_file(problem.operation)), problem, TARGET)
    assert wide.reduction_kinds
    monkeypatch.setattr("generator.space.walk.PATIENCE", 16_000)
    for seed in range(20):
        drawn = wide.draw(random.Random(seed), ())
        assert drawn is not None and wide.is_legal(drawn)
