"""Legal configs only, none twice, and as near to a proposal as can be."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean, median, quantiles

import pytest
from optuna.trial import TrialState

from generator.kernels.strategies import STRATEGIES, is_deterministic
from generator.paths import REPOSITORY
from generator.problem import Problem
from generator.search.sampler import (
    FAMILY_SHARE,
    FEWEST_OF_FAMILY,
    FIRST,
    STEP,
    LegalSampler,
    NothingLeftError,
    distributions,
    uncrowded,
)
from generator.space.family import family_of
from generator.space.legal_configs import REDUCTION_KNOBS, LegalConfigs
from generator.target import find_target
from tests.support.searches import ask_and_tell, new_study, of_families, ratio_of
from tests.support.synthetic import LEGAL, PROBLEM, SPACE, TARGET, shrink

PLACES = [
    ("4096x1024:bf16", "h200"),
    ("64x1001:bf16:fp32", "h200"),
    ("4096x16384:fp32", "gb200"),
    ("8192x3072:fp16", "a100"),
]


def place(problem: str, gpu: str) -> LegalConfigs:
    return LegalConfigs(SPACE, Problem.parse(problem), find_target(gpu))


def is_legal(legal: LegalConfigs, config: Mapping[str, int | str]) -> bool:
    return legal.space.reject(config, legal.problem, legal.target) is None


@pytest.mark.parametrize(("problem", "gpu"), PLACES)
def test_any_proposal_leads_to_a_legal_config_or_none(problem: str, gpu: str) -> None:
    legal = place(problem, gpu)
    rng = random.Random(1)
    found = 0
    for _ in range(40):
        wanted = {knob.name: rng.choice(knob.choices) for knob in SPACE.knobs}
        config = legal.nearest(wanted, rng)
        if config is not None:
            found += 1
            assert is_legal(legal, config)
    assert found >= 10


def test_a_legal_config_is_its_own_nearest() -> None:
    rng = random.Random(2)
    for _ in range(20):
        config = SPACE.sample(PROBLEM, TARGET, rng)
        assert LEGAL.nearest(config, rng) == config


def test_one_wrong_knob_is_mended_by_one_change() -> None:
    rng = random.Random(3)
    mended = 0
    while mended < 40:
        config = SPACE.sample(PROBLEM, TARGET, rng)
        knob = rng.choice(SPACE.knobs)
        wanted = SPACE.normalize({**config, knob.name: rng.choice(knob.values)}, PROBLEM, TARGET)
        back = SPACE.normalize({**wanted, knob.name: config[knob.name]}, PROBLEM, TARGET)
        if is_legal(LEGAL, wanted) or back != config:
            continue
        near = LEGAL.nearest(wanted, rng)
        assert near is not None
        one_change = [
            SPACE.normalize({**wanted, name: value}, PROBLEM, TARGET)
            for name, value in near.items()
            if value != wanted[name]
        ]
        assert near in one_change
        mended += 1


def test_held_knobs_stay_and_taken_configs_do_not_count() -> None:
    rng = random.Random(4)
    config = SPACE.sample(PROBLEM, TARGET, rng, {"strategy": "separate"})
    near = LEGAL.nearest(
        {**config, "strategy": "semaphore"}, rng, held=REDUCTION_KNOBS, taken={LEGAL.key(config)}
    )
    assert near is not None
    assert near["strategy"] == "semaphore"
    other = LEGAL.nearest(near, rng, held=REDUCTION_KNOBS, taken={LEGAL.key(near)})
    assert other is not None
    assert other != near
    assert other["strategy"] == "semaphore"


def test_nondeterministic_proposals_become_deterministic_ones() -> None:
    rng = random.Random(5)
    for fixed in ({"strategy": "atomic"}, {"strategy": "bulk_reduce", "order": "free"}):
        config = SPACE.sample(PROBLEM, TARGET, rng, fixed)
        assert not is_deterministic(config)
        near = LEGAL.nearest(config, rng, deterministic=True)
        assert near is not None
        assert is_deterministic(near)


def test_reduction_kinds_are_the_legal_ones() -> None:
    kinds = [tuple(config[name] for name in REDUCTION_KNOBS) for config in LEGAL.reduction_kinds]
    assert kinds == [(strategy.name, strategy.order) for strategy in STRATEGIES]
    on_a100 = place("8192x3072:fp16", "a100").reduction_kinds
    assert "bulk_reduce" not in {config["strategy"] for config in on_a100}


@pytest.mark.parametrize(("problem", "gpu"), PLACES)
def test_neighbours_are_legal_and_deterministic(problem: str, gpu: str) -> None:
    legal = place(problem, gpu)
    rng = random.Random(6)
    config = legal.draw(rng, ())
    assert config is not None
    neighbours = list(legal.around(config, rng))
    assert len({legal.key(neighbour) for neighbour in neighbours}) >= 10
    for neighbour in neighbours:
        assert neighbour != config
        assert is_legal(legal, neighbour)
        assert is_deterministic(neighbour)
    kinds = [tuple(c[name] for name in REDUCTION_KNOBS) for c in (config, *neighbours)]
    assert set(kinds[1:]) - {kinds[0]}


def test_neighbours_one_change_away_come_first_and_completely() -> None:
    rng = random.Random(7)
    config = LEGAL.draw(rng, ())
    assert config is not None
    near = set()
    for knob in SPACE.knobs:
        for value in knob.values:
            moved = SPACE.normalize({**config, knob.name: value}, PROBLEM, TARGET)
            deterministic = is_deterministic(moved)
            if moved != config and moved[knob.name] == value and deterministic:
                near |= {LEGAL.key(moved)} if is_legal(LEGAL, moved) else set()
    walk = [LEGAL.key(neighbour) for neighbour in LEGAL.around(config, rng)]
    assert set(walk[: len(near)]) == near


def test_a_config_of_another_space_is_adapted() -> None:
    rng = random.Random(8)
    config = LEGAL.draw(rng, ())
    assert config is not None
    foreign = {**config, "swizzle": 3, "stages": 99}
    assert not LEGAL.is_legal(foreign)
    adapted = LEGAL.adapt(foreign, rng)
    assert adapted is not None
    assert LEGAL.is_legal(adapted)
    assert adapted["strategy"] == config["strategy"]


def test_drawing_ends_when_nothing_is_left(tmp_path: Path) -> None:
    keep = LEGAL.first(1)[0]
    space = shrink(tmp_path, keep, store_hint=["default", "streaming"], grid=["full", "even"])
    legal = LegalConfigs(space, PROBLEM, TARGET)
    rng = random.Random(9)
    taken = set()
    for _ in range(4):
        config = legal.draw(rng, taken)
        assert config is not None
        assert legal.key(config) not in taken
        taken.add(legal.key(config))
    assert legal.draw(rng, taken) is None


PROPOSED = 45
"""The proposals that a search makes first, more than half of them by the surrogate."""


@cache
def proposed() -> list[dict[str, int | str]]:
    """The first proposals, which more than one test looks at."""
    return ask_and_tell(LegalSampler(LEGAL, seed=2), PROPOSED)


def test_every_proposal_is_legal_deterministic_and_new() -> None:
    configs = proposed()
    assert all(is_legal(LEGAL, config) for config in configs)
    assert all(is_deterministic(config) for config in configs)
    assert len({LEGAL.key(config) for config in configs}) == PROPOSED


@pytest.mark.usefixtures("quick_proposals")
def test_a_small_space_is_proposed_whole_and_nothing_twice(tmp_path: Path) -> None:
    """Its random candidates are mostly taken ones."""
    several = {"slice_columns": [32, 64, 128, 16], "stages": [3, 2, 4], "grid": ["full", "even"]}
    several |= {"store_hint": ["default", "streaming"], "load_hint": ["default", "evict_last"]}
    legal = LegalConfigs(shrink(tmp_path, LEGAL.first(1)[0], **several), PROBLEM, TARGET)
    every = legal.first(100)
    assert len(every) > FIRST + 5
    study = new_study(LegalSampler(legal, seed=1))
    found = []
    for _ in every:
        trial = study.ask(distributions(legal.space))
        found.append(trial.params)
        study.tell(trial, ratio_of(trial.params))
    assert sorted(map(legal.key, found)) == sorted(map(legal.key, every))
    with pytest.raises(NothingLeftError):
        study.ask(distributions(legal.space))


def test_equal_seeds_alone_propose_alike_in_every_process() -> None:
    """The other process hashes strings in another way than this one, so its sets have another
    order."""
    program = (
        "from generator.search.sampler import LegalSampler\n"
        "from tests.support.searches import LEGAL, ask_and_tell\n"
        "print(list(map(LEGAL.key, ask_and_tell(LegalSampler(LEGAL, seed=2), 30))))"
    )
    hash_seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    output = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert output.strip() == str(list(map(LEGAL.key, proposed()[:30])))
    assert proposed()[:5] != ask_and_tell(LegalSampler(LEGAL, seed=3), 5)


@pytest.mark.usefixtures("quick_proposals")
def test_the_surrogate_finds_better_configs_sooner_than_chance() -> None:
    """On average over seeds, the best of 60 proposals is better than that of 60 random configs
    mostly is, and half of the last ones are among the best tenth of random configs."""
    rng = random.Random(0)
    drawn = [LEGAL.draw(rng, ()) for _ in range(20 * 60)]
    by_chance = [ratio_of(config) for config in drawn if config]
    best_by_chance = median(min(by_chance[i : i + 60]) for i in range(0, len(drawn), 60))
    best, last = [], []
    for seed in range(4):
        ratios = [ratio_of(config) for config in ask_and_tell(LegalSampler(LEGAL, seed), 60)]
        best.append(min(ratios))
        last.append(median(ratios[40:]))
    assert fmean(best) < best_by_chance
    assert fmean(last) < quantiles(by_chance, n=10)[0]


@pytest.mark.usefixtures("quick_proposals")
def test_a_knob_of_one_value_changes_no_proposal(tmp_path: Path) -> None:
    """So a space that gains a knob, but no config, is searched as before."""
    several = {"slice_columns": [32, 64, 128, 16], "stages": [3, 2, 4], "grid": ["full", "even"]}
    several |= {"store_hint": ["default", "streaming"], "ctas_per_sm": [1, 2, 3]}
    space = shrink(tmp_path, LEGAL.first(1)[0], **several)
    fewer = replace(space, knobs=tuple(k for k in space.knobs if k.name != "column_sums"))
    assert len(fewer.knobs) == len(space.knobs) - 1
    found = []
    for one in (space, fewer):
        study = new_study(LegalSampler(LegalConfigs(one, PROBLEM, TARGET), seed=1))
        configs = []
        for _ in range(2 * FIRST):
            trial = study.ask(distributions(one))
            configs.append({**trial.params, "column_sums": "late"})
            study.tell(trial, ratio_of(configs[-1]))
        found.append(configs)
    assert found[0] == found[1]


@pytest.mark.usefixtures("quick_proposals")
def test_a_study_in_which_nothing_may_win_goes_on() -> None:
    """Trials without a time, then equal times that violate the constraint."""
    sampler = LegalSampler(LEGAL, seed=7)
    study = new_study(sampler)
    for number in range(2 * FIRST + 5):
        trial = study.ask(distributions(SPACE))
        if number < FIRST:
            study.tell(trial, state=TrialState.PRUNED)
        else:
            trial.set_constraint("infeasible", 1.0)
            study.tell(trial, 1.2)
    assert len(sampler.taken) == 2 * FIRST + 5


def test_most_surrogate_proposals_are_near_the_best() -> None:
    """Though most candidates are random ones."""
    configs = proposed()

    def change(number: int) -> int:
        """Knobs in which a config differs from the closest of the five best before it."""
        told = [config for place, config in enumerate(configs[:number]) if place % 5 != 4]
        best = sorted(told, key=ratio_of)[: len(STEP)]
        return min(sum(b[knob] != configs[number][knob] for knob in b) for b in best)

    changes = [change(number) for number in range(FIRST, len(configs))]
    assert sum(changed <= 4 for changed in changes) > len(changes) / 2
    assert min(changes) == 1


@pytest.mark.usefixtures("quick_proposals")
@pytest.mark.parametrize("share", [FAMILY_SHARE, 1.0], ids=["limited", "free"])
def test_no_family_takes_a_search_for_itself(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cost that one family alone makes low; without the limit it would have most proposals."""
    monkeypatch.setattr("generator.search.sampler.FAMILY_SHARE", share)
    best = family_of(min(proposed(), key=ratio_of))
    sampler = LegalSampler(LEGAL, seed=1)
    study = new_study(sampler)
    configs = []
    for _ in range(60):
        trial = study.ask(distributions(SPACE))
        configs.append(trial.params)
        alike = sum(a == b for a, b in zip(family_of(trial.params), best, strict=True))
        study.tell(trial, ratio_of(trial.params) * 1.5 ** (len(best) - alike))
    most = Counter(map(family_of, configs)).most_common(1)[0]
    assert (most[1] <= FAMILY_SHARE * len(configs)) is (share < 1)


def test_crowded_families_wait_until_others_had_their_share() -> None:
    candidates = of_families(12)
    one, *others = candidates
    few = [one] * (FEWEST_OF_FAMILY - 1)
    assert uncrowded(candidates, few) == candidates
    assert uncrowded(candidates, [*few, one]) == others
    enough = [config for config in others for _ in range(FEWEST_OF_FAMILY // 2)]
    assert uncrowded(candidates, [*few, one, *enough]) == candidates, "less than a fifth of all"
    assert uncrowded([one], [one] * 50 + others) == [one], "there is nothing else"
    two = candidates[:2]
    assert uncrowded(two, [one] * 60 + [two[1]] * 2) == two, "of two, both may have any share"
    three = candidates[:3]
    assert uncrowded(three, [one] * 60 + [three[1]] * 20) == three[1:]
    assert uncrowded([], []) == []


def test_planned_configs_go_first_as_they_are() -> None:
    rng = random.Random(11)
    planned = [SPACE.sample(PROBLEM, TARGET, rng, {"strategy": "atomic"}) for _ in range(2)]
    sampler = LegalSampler(LEGAL, seed=5)
    sampler.planned.extend(planned)
    configs = ask_and_tell(sampler, 3)
    assert configs[:2] == planned
    assert configs[2]["strategy"] != "atomic"


def test_taken_configs_are_never_proposed(tmp_path: Path) -> None:
    space = shrink(tmp_path, LEGAL.first(1)[0], store_hint=["default", "streaming"])
    legal = LegalConfigs(space, PROBLEM, TARGET)
    sampler = LegalSampler(legal, seed=6)
    first, second = legal.first(2)
    sampler.taken.add(legal.key(first))
    study = new_study(sampler)
    assert study.ask(distributions(space)).params == second
    with pytest.raises(NothingLeftError):
        study.ask(distributions(space))
