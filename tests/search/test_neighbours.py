"""The winners of neighbouring shapes that are carried over, and when they are tried."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from optuna.storages import BaseStorage

from generator.problem import Problem
from generator.search.neighbours import CARRIED, NEAREST, carried_over, neighbours
from generator.studies.records import Winner
from generator.studies.study_log import StudyLog
from tests.support.searches import of_families, records, search
from tests.support.synthetic import LEGAL, PROBLEM, FakeEvaluator, make_winner

pytestmark = pytest.mark.usefixtures("quick_proposals")

CONFIGS = of_families(30)


def at(shapes: Sequence[str], first: int = 0, **changes: str) -> list[Winner]:
    """A winner of each shape, each of another family."""
    return [
        make_winner(config, problem=Problem.parse(shape), **changes)
        for shape, config in zip(shapes, CONFIGS[first:], strict=False)
    ]


def names(winners: Sequence[Winner]) -> list[str]:
    return [str(winner.problem) for winner in winners]


def test_neighbours_differ_in_rows_in_columns_or_in_dtypes_alone() -> None:
    rows = ["65536x1024:bf16", "8192x1024:bf16", "1024x1024:bf16"]
    columns = ["4096x2048:bf16", "4096x4096:bf16", "4096x768:bf16"]
    dtypes = ["4096x1024:fp32", "4096x1024:bf16:fp32", "4096x1024:bf16+residual"]
    far = ["8192x2048:bf16", "8192x1024:fp32", "layernorm_backward:8192x1024:bf16"]
    found = neighbours(PROBLEM, "h200", at([*far, *rows, *columns, *dtypes, str(PROBLEM)]))
    assert NEAREST == 2, "the nearest of every kind come first"
    assert names(found) == [rows[1], columns[2], dtypes[2], rows[2], columns[0], dtypes[1]]


def test_only_the_last_measured_winner_of_the_same_gpu_is_a_neighbour() -> None:
    shape = ["8192x1024:bf16"]
    older, newer = at(shape), at(shape, 1)
    predicted = at(shape, 2, evidence="predicted")
    elsewhere = at(shape, 3, target="h100")
    found = neighbours(PROBLEM, "h200", [*older, *newer, *predicted, *elsewhere])
    assert found == newer


def test_what_was_tried_is_not_carried_over_again() -> None:
    winners = at([f"{2**power}x1024:bf16" for power in (13, 10)])
    one, other = (winner.config for winner in winners)
    rng = random.Random(0)
    assert carried_over(LEGAL, winners, (), rng, 9) == [one, other]
    assert carried_over(LEGAL, winners, (), rng, 1) == [one]
    assert carried_over(LEGAL, winners, {LEGAL.key(one)}, rng, 9) == [other]
    taken = {LEGAL.key(one), LEGAL.key(other)}
    assert carried_over(LEGAL, winners, taken, rng, 9) == []


def save(storage: BaseStorage, winners: Sequence[Winner]) -> None:
    for winner in winners:
        study = f"{winner.problem}@h200-132sm:measured"
        StudyLog(storage, study).save_finals(winner, [], 1, {})


def test_neighbours_that_are_finished_meanwhile_are_tried_before_the_finals(
    storage: BaseStorage,
) -> None:
    """This run searches other shapes, too. Their winners are tried here
    within the budget, and may win."""
    early, late = at(["8192x1024:bf16"]), at(["2048x1024:bf16"], 20)
    save(storage, early)

    class Busy(FakeEvaluator):
        def evaluate(self, *arguments):  # type: ignore[no-untyped-def]
            if len(self.evaluated) == 30:
                save(storage, late)
            return super().evaluate(*arguments)

    chosen = late[0].config
    evaluator = Busy(lambda v: 1.0 if dict(v.config) == chosen else 1.5)
    winner = search(storage, evaluator, trials=60)
    assert winner is not None and winner.config == chosen and winner.trials == 60
    done = records(storage)
    origins = [record.origin for record in done]
    assert [r.config for r in done if r.origin == "neighbour"] == [chosen]
    assert origins.count("seed") > 0 and done[0].config == early[0].config
    assert 60 - CARRIED - 10 <= origins.index("neighbour") < origins.index("overhead")


@pytest.mark.parametrize("evidence", ["measured", "predicted"])
def test_neighbours_take_a_small_share_of_a_measured_search(
    evidence: str, storage: BaseStorage
) -> None:
    shapes = ["8192x1024:bf16", "2048x1024:bf16", "4096x768:bf16", "4096x2048:bf16"]
    shapes += ["4096x1024:fp16", "4096x1024:bf16:fp32"]
    nearer = [f"{M}x1024:bf16+offset" for M in range(4097, 4097 + 14)]
    winners = [*at(nearer, 6), *at(shapes)]
    search(storage, FakeEvaluator(evidence=evidence), trials=40, known_winners=winners)
    name = f"{PROBLEM}@h200-132sm:{evidence}"
    found = [study for study in storage.get_all_studies() if study.study_name.startswith(name)]
    done = records(storage, found[0].study_name)
    carried = [record for record in done if record.origin == "neighbour"]
    assert len(done) == 40
    assert len(carried) == (4 if evidence == "measured" else 0), "a tenth"
