"""benchmarks.determinism_overhead: what it tries, and what it puts beside the winner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from benchmarks import determinism_overhead
from benchmarks.determinism_overhead import Climb, overhead
from generator.kernels.nvrtc import Compiled
from generator.kernels.strategies import is_deterministic, strategy_of
from generator.kernels.variant import Variant
from generator.problem import Problem
from generator.search.budget import Budget
from generator.search.search import search_problem
from generator.studies.reader import Study, read_studies
from generator.studies.storage import open_storage
from tests.support.synthetic import LEGAL, FakeEvaluator, FakePool, cost

KINDS = [kind for kind in LEGAL.reduction_kinds if not is_deterministic(kind)]


class Timing(FakeEvaluator):
    """Times candidates side by side as well."""

    def shortlist(
        self, problem: Problem, entries: Sequence[tuple[Variant, Compiled]], blocks: int = 1
    ) -> list[float]:
        self.beside = [
            (str(strategy_of(variant.config)), self.cost(variant)) for variant, _ in entries
        ]
        return [ratio for _, ratio in self.beside]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    folder = tmp_path_factory.mktemp("studies")
    storage = open_storage(folder / "studies.journal")
    assert search_problem(LEGAL, FakePool(), FakeEvaluator(), storage, Budget(60))
    (found,) = read_studies(folder)
    return found


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(strategy_of(kind)))
def test_a_search_keeps_to_its_reduction_and_its_budget(kind: dict[str, int | str]) -> None:
    ranked = [LEGAL.space.sample(LEGAL.problem, LEGAL.target, Random(i)) for i in range(40)]
    climb = Climb(LEGAL, kind, ranked, 60, Random(0))
    keys, generations = set(), 0
    while configs := climb.ask(7):
        generations += 1
        for config in configs:
            assert strategy_of(config) == strategy_of(kind)
            assert LEGAL.is_legal(config)
            keys.add(LEGAL.key(config))
            climb.tell(config, float(len(keys)))
    assert len(keys) == climb.tried == 60
    assert generations == 9
    assert [LEGAL.key(config) for config in climb.best(3)] == [
        LEGAL.key(config) for _, config in climb.timed[:3]
    ]


def test_it_starts_from_the_study() -> None:
    start = dict(LEGAL.space.sample(LEGAL.problem, LEGAL.target, Random(1)))
    start |= {"strategy": "separate", "load_hint": "evict_last"}
    start = LEGAL.nearest(start, Random(0), held=["strategy", "load_hint"])
    assert start is not None
    (first, *_) = Climb(LEGAL, KINDS[0], [start] * 30, 30, Random(0)).ask(30)
    same = [name for name in start if first[name] == start[name]]
    assert first["load_hint"] == "evict_last"
    assert len(same) > len(start) * 0.6


def test_the_fastest_of_each_reduction_stands_beside_the_winner(study: Study) -> None:
    assert study.winner is not None

    def planted(variant: Variant) -> float:
        return cost(variant) / 2 if variant["strategy"] == "atomic" else cost(variant)

    timing = Timing(planted)
    row = overhead(LEGAL, FakePool(), timing, study, seed=0)
    own = strategy_of(study.winner.config)
    trials = sum(strategy_of(record.config) == own for record in study.records)
    assert row["winner"] == str(own)
    assert row["trials_of_winner"] == trials > 0
    assert set(row["trials"].values()) == {trials}
    assert row["over_floor"].keys() == {str(own), *(str(strategy_of(kind)) for kind in KINDS)}
    for name, ratio in row["over_floor"].items():
        assert ratio == round(min(each for of, each in timing.beside if of == name), 4)


def test_without_studies_or_a_winner_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out.json")
    code = determinism_overhead.main(["--studies", str(tmp_path), "--out", out])
    assert code == 2
    assert "no studies" in capsys.readouterr().err
