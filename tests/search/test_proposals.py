"""The trials of a search on a made-up cost: seeds, phases, shares, warm starts, sweeps."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from optuna.storages import BaseStorage

from generator.kernels.geometry import Config
from generator.kernels.strategies import is_deterministic
from generator.kernels.variant import make_variant
from generator.problem import Problem
from generator.search.proposals import Proposals
from generator.search.starts import (
    FAMILIES,
    incumbent_and_starts,
    one_of_each_family,
    warm_starts,
)
from generator.space.family import family_of
from generator.space.legal_configs import LegalConfigs
from generator.studies.records import Record, Winner
from tests.support.searches import DETERMINISTIC, of_families, ratio_of, records, search, won
from tests.support.synthetic import (
    FLOOR_US,
    LEGAL,
    PROBLEM,
    SPACE,
    TARGET,
    FakeEvaluator,
    cost,
    make_winner,
    shrink,
    timed,
)

pytestmark = pytest.mark.usefixtures("quick_proposals")


def test_only_legal_configs_and_none_twice_in_phases_that_follow_each_other(
    storage: BaseStorage,
) -> None:
    evaluator = FakeEvaluator()
    search(storage, evaluator, trials=100)
    origins = [record.origin for record in records(storage)]
    assert list(dict.fromkeys(origins)) == ["seed", "search", "overhead"]
    assert Counter(origins)["search"] >= 80
    tried = [record.config for record in records(storage)]
    assert len(tried) == 100
    assert all(SPACE.reject(config, PROBLEM, TARGET) is None for config in tried)
    assert len({LEGAL.key(config) for config in tried}) == 100
    assert len({LEGAL.key(config) for config in evaluator.evaluated}) == len(evaluator.evaluated)


def test_every_reduction_kind_has_a_seed_in_the_shape_of_the_best(storage: BaseStorage) -> None:
    known = LEGAL.draw(random.Random(1), ())
    assert known is not None
    start = replace(make_winner(known), problem=Problem.parse("8192x1024:bf16"))
    search(storage, trials=20, known_winners=[start])
    seeds = [record.config for record in records(storage) if record.origin == "seed"]
    assert seeds[0] == known
    assert {(c["strategy"], c["order"]) for c in seeds} == {
        (c["strategy"], c["order"]) for c in LEGAL.reduction_kinds
    }
    shape = ("threads_per_row", "rows_per_cta", "rows_in_flight", "ctas_per_sm")
    kept = [all(seed[knob] == known[knob] for knob in shape) for seed in seeds]
    assert sum(kept) > len(kept) / 2


def test_the_best_so_far_is_no_trial_whose_own_floor_was_slow() -> None:
    def record(config: Config, ratio: float, floor_us: float = FLOOR_US) -> Record:
        return Record(config, "v", timed(ratio, floor_us=floor_us), "seed", 1.0)

    slow, *others = DETERMINISTIC[:4]
    tried = [record(slow, 1.0, 1.2 * FLOOR_US), *(record(config, 1.1) for config in others)]
    proposals = Proposals(LEGAL, random.Random(0), [], tried, set(), lambda: 0.0, 40, 200)
    assert list(proposals._ranked()) == [*sorted(others, key=LEGAL.rank), slow]


def test_reduction_kinds_that_cannot_win_get_a_small_share(storage: BaseStorage) -> None:
    search(storage, FakeEvaluator(lambda v: cost(v) - (v.determinism == "none")), trials=100)
    ineligible = [r for r in records(storage) if not is_deterministic(r.config)]
    assert {r.origin for r in ineligible} == {"seed", "overhead"}
    assert 4 <= len(ineligible) <= 10


def test_a_small_space_is_swept_in_the_order_of_the_file(
    storage: BaseStorage, tmp_path: Path
) -> None:
    space = shrink(
        tmp_path,
        LEGAL.first(1)[0],
        strategy=["column_slices", "separate", "atomic"],
        store_hint=["default", "streaming"],
        grid=["full", "even"],
    )
    winner = won(search(storage, space=space, trials=50))
    legal = LegalConfigs(space, PROBLEM, TARGET)
    every = legal.first(1000)
    tried = [record.config for record in records(storage, winner.study)]
    assert 8 <= len(every) < 50
    assert tried == every
    assert winner.trials == len(every)
    assert cost(make_variant(winner.config, PROBLEM)) <= 1.01 * min(
        ratio_of(config) for config in every if is_deterministic(config)
    )


def test_a_space_larger_than_the_budget_is_not_swept(storage: BaseStorage, tmp_path: Path) -> None:
    space = shrink(tmp_path, LEGAL.first(1)[0], slice_columns=[32, 64, 128, 16])
    winner = won(search(storage, space=space, trials=3))
    assert winner.trials == 3
    assert "sweep" not in {record.origin for record in records(storage, winner.study)}


def test_winners_of_near_problems_are_tried_first(storage: BaseStorage) -> None:
    neighbour = Problem.parse("8192x1024:bf16")
    other = won(search(storage, trials=40, problem=neighbour))
    evaluator = FakeEvaluator()
    search(storage, evaluator, trials=30)
    assert evaluator.evaluated[0] == other.config


def test_warm_starts_come_nearest_first() -> None:
    configs = [*DETERMINISTIC, *({**DETERMINISTIC[0], "register_cap": cap} for cap in (96, 128))]

    def at(problem: str, place: int, target: str = "h200") -> Winner:
        where = Problem.parse(problem)
        return make_winner(configs[place], problem=where, target=target)

    far = at("65536x1024:bf16", 0)
    near = at("8192x1024:bf16", 1)
    as_wide = at("4096x1024:fp16", 4)
    other_weight = at("4096x1024:bf16:fp32", 5)
    other_operation = at("layernorm_backward:8192x1024:bf16", 6)
    wider = at("4096x1024:fp32", 2)
    other_gpu = at("4096x1024:bf16", 3, "h100")
    same_config = at("16384x1024:bf16", 1)
    winners = [other_gpu, wider, far, same_config, other_operation, near, as_wide, other_weight]
    found = warm_starts(PROBLEM, TARGET, winners)
    nearest_first = (other_weight, as_wide, near, other_operation, far, wider, other_gpu)
    assert found == [w.config for w in nearest_first]


def test_equal_winners_take_one_place_among_the_starts() -> None:
    class Preferring(FakeEvaluator):
        tie = 0.01

        def starts(self, problem: Problem) -> list[Config]:
            return [dict(config) for config in DETERMINISTIC[:3] for _ in range(4)]

        def agreement(self, problem: Problem, config: Config) -> float:
            return 0.0

    other = make_winner(DETERMINISTIC[3], problem=Problem.parse("8192x1024:bf16"))
    legal = LegalConfigs(SPACE, PROBLEM, TARGET)
    found = incumbent_and_starts(legal, Preferring(), [other], "a study", random.Random(0))
    assert found == (None, DETERMINISTIC[:4])


def test_starts_are_one_of_each_family_from_every_side(storage: BaseStorage) -> None:
    """However many winners are near, those of another dtype and of another GPU have their turns;
    and of several of a family the nearest is tried."""
    *here, wider, there, farther = of_families(FAMILIES + 3)
    first = here[0]
    near = {**first, "store_hint": "streaming" if first["store_hint"] == "default" else "default"}
    assert LEGAL.is_legal(near) and family_of(near) == family_of(first)

    def at(shape: str, config: Config, target: str = "h200") -> Winner:
        return make_winner(config, problem=Problem.parse(shape), target=target)

    winners = [at("65536x1024:bf16", farther, "h100"), at("4096x1024:bf16", there, "h100")]
    winners += [at(f"{2 ** (14 + place)}x1024:bf16", config) for place, config in enumerate(here)]
    winners += [at("4096x1024:fp32", wider), at("8192x1024:bf16", near)]
    winners += [at("2048x1024:bf16", first, "h100")]  # its family is there already
    expected = [near, wider, there, here[1], here[2], farther, *here[3 : FAMILIES - 3]]
    assert one_of_each_family(LEGAL, winners, random.Random(0)) == expected
    search(storage, trials=20, known_winners=winners)
    assert [dict(record.config) for record in records(storage)][:FAMILIES] == expected


def test_what_is_expected_decides_among_the_starts_of_the_same_gpu() -> None:
    """The best of each family, the best family first; other GPUs keep their turns. No more are
    looked at than take a moment."""
    families = of_families(FAMILIES + 4)
    *here, there, farther = sorted(families, key=lambda one: one["store_hint"] == "default")
    worse, better = here[0], {**here[0], "store_hint": "default"}
    assert worse["store_hint"] != "default" and LEGAL.is_legal(better)

    def at(shape: str, config: Config, target: str = "h200") -> Winner:
        return make_winner(config, problem=Problem.parse(shape), target=target)

    winners = [at("65536x1024:bf16", farther, "h100"), at("4096x1024:bf16", there, "h100")]
    winners += [at(f"{4097 + place}x1024:bf16", config) for place, config in enumerate(here)]
    winners += [at("4096x1024:fp32", better)]
    ranked = [*reversed(here[1:]), better, worse]
    asked: list[int] = []

    def expect(configs: Sequence[Config]) -> list[float]:
        asked.append(len(configs))
        return [float(ranked.index(dict(config))) for config in configs]

    found = one_of_each_family(LEGAL, winners, random.Random(0), expect)
    assert found == [ranked[0], there, ranked[1], farther, *ranked[2 : FAMILIES - 2]]
    found = one_of_each_family(LEGAL, winners, random.Random(0), expect, number=3)
    assert found == [ranked[0], there, ranked[1]]
    found = one_of_each_family(LEGAL, winners, random.Random(0), expect, number=30)
    assert [config for config in found if config in (better, worse)] == [better]
    ranked += LEGAL.first(50)
    many = [at(f"{4097 + place}x1024:bf16", config) for place, config in enumerate(ranked[-50:])]
    one_of_each_family(LEGAL, many, random.Random(0), expect)
    assert asked == [*[len(here) + 1] * 3, 40]


def test_a_search_asks_its_experience_about_the_starts(
    storage: BaseStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    worse, better = of_families(2)

    class Known:
        def expect(self, configs: Sequence[Config]) -> list[float]:
            return [0.0 if dict(config) == better else 1.0 for config in configs]

    monkeypatch.setattr("generator.search.search.learn", lambda *_: Known())
    winners = [
        make_winner(config, problem=Problem.parse(f"{M}x1024:bf16"))
        for M, config in ((8192, worse), (65536, better))
    ]
    evaluator = FakeEvaluator()
    search(storage, evaluator, trials=10, known_winners=winners)
    assert evaluator.evaluated[:2] == [better, worse]


def test_so_many_families_are_enough_to_start_from() -> None:
    configs = of_families(FAMILIES + 3)
    winners = [
        make_winner(config, problem=Problem.parse(f"{2 ** (13 + place)}x1024:bf16"))
        for place, config in enumerate(configs)
    ]
    legal = LegalConfigs(SPACE, PROBLEM, TARGET)
    found = incumbent_and_starts(legal, FakeEvaluator(), winners, "a study", random.Random(0))
    assert found == (None, configs[:FAMILIES])


def test_starts_are_of_distinct_families_once_they_are_legal() -> None:
    """Two families elsewhere may be one where a value is not to be had."""
    first, other = of_families(2)
    illegal = {**first, "threads_per_row": 1024, "rows_per_cta": 8, "ctas_per_sm": 8}
    assert not LEGAL.is_legal(illegal)
    winners = [
        make_winner(config, problem=Problem.parse(f"{M}x1024:bf16"))
        for M, config in ((8192, first), (16384, illegal), (32768, other))
    ]
    found = one_of_each_family(LEGAL, winners, random.Random(0))
    assert all(map(LEGAL.is_legal, found))
    assert len({family_of(config) for config in found}) == len(found)


def test_longer_rows_start_with_as_many_columns_in_each_cta() -> None:
    problem = Problem.parse("8192x16384:bf16")
    legal = LegalConfigs(SPACE, problem, TARGET)
    one = next(c for c in DETERMINISTIC if c["cluster"] == 1)
    for shape, cluster, expected in (
        ("8192x4096:bf16", 1, [4, 1]),
        ("8192x8192:bf16", 2, [4, 2]),
        ("8192x32768:bf16", 8, [4, 8]),
        ("4096x16384:bf16", 2, [2]),
        ("8192x3072:bf16", 1, [1]),  # 16384 is no multiple of 3072
        ("8192x512:bf16", 1, [1]),  # there are no clusters of 32
    ):
        config = {**one, "cluster": cluster}
        winner = make_winner(config, problem=Problem.parse(shape))
        found = warm_starts(problem, TARGET, [winner])
        assert [c["cluster"] for c in found] == expected, shape
        adapted = legal.adapt(found[0], random.Random(0))
        assert adapted is not None
        assert legal.is_legal(adapted)


def test_a_space_as_large_as_the_limit_is_swept(storage: BaseStorage, tmp_path: Path) -> None:
    space = shrink(tmp_path, LEGAL.first(1)[0], slice_columns=[32, 64, 128, 16])
    count = len(LegalConfigs(space, PROBLEM, TARGET).first(99))
    winner = won(search(storage, space=space, trials=count))
    assert winner.trials == count > 1
    assert {record.origin for record in records(storage, winner.study)} == {"sweep"}
