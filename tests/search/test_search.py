"""A search on a made-up cost: what it stores of every trial, what it shares, when it ends."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from generator.errors import NormforgeError
from generator.kernels.strategies import is_deterministic
from generator.kernels.variant import Variant, make_variant
from generator.problem import Problem
from generator.result import Result
from generator.search.budget import Budget, Progress
from generator.space.legal_configs import LegalConfigs
from generator.studies.records import Winner, study_name
from generator.studies.storage import open_storage
from generator.studies.study_log import METRIC, StudyLog, stored_winners
from tests.support.patience import patience
from tests.support.searches import NAME, records, search, won
from tests.support.synthetic import (
    LEGAL,
    PROBLEM,
    SPACE,
    STATIC_SMEM,
    TARGET,
    FakeEvaluator,
    FakePool,
    cost,
    shrink,
)

pytestmark = pytest.mark.usefixtures("quick_proposals")


def test_the_search_ends_when_nothing_is_left(storage: BaseStorage, tmp_path: Path) -> None:
    space = shrink(tmp_path, LEGAL.first(1)[0], store_hint=["default", "streaming"])
    winner = won(search(storage, space=space, budget=Budget(trials=500, sweep_limit=1)))
    assert winner.trials == 2


def test_a_search_with_nothing_left_still_measures_the_overhead_of_determinism(
    storage: BaseStorage, tmp_path: Path
) -> None:
    """A run measures as much of it as the budget says, though more trials are left, and a later
    run no more."""
    several = {"strategy": ["column_slices", "atomic"], "stages": [3, 2, 4]}
    several |= {"store_hint": ["default", "streaming"], "grid": ["full", "even"]}
    space = shrink(tmp_path, LEGAL.first(1)[0], **several)
    every = LegalConfigs(space, PROBLEM, TARGET).first(100)
    eligible = sum(map(is_deterministic, every))
    assert len(every) - eligible > 6
    budget = Budget(trials=100, sweep_limit=1)
    winner = won(search(storage, space=space, budget=budget))
    origins = Counter(record.origin for record in records(storage))
    assert origins == {"seed": 2, "search": eligible - 1, "overhead": 5}
    again = FakeEvaluator()
    assert search(storage, again, space=space, budget=budget) == winner
    assert again.evaluated == []


def test_seconds_end_a_search(storage: BaseStorage) -> None:
    started = time.monotonic()
    winner = won(search(storage, FakeEvaluator(delay=0.02), budget=Budget(500, seconds=0.8)))
    assert 1 <= winner.trials <= 40, "a trial takes 20 ms, and longer on a busy machine"
    assert time.monotonic() - started < patience(5)
    again = FakeEvaluator()
    # Counted time ends with the last trial: the first run may have ended on its way to another.
    assert search(storage, again, budget=Budget(500, seconds=0.4)) == winner
    assert again.evaluated == [], "the seconds of the first run count"


def test_a_shape_without_a_legal_config_is_refused(storage: BaseStorage) -> None:
    with pytest.raises(NormforgeError, match="no legal config for 64x131071:fp32 on h200"):
        search(storage, problem=Problem.parse("64x131071:fp32"))


@pytest.mark.parametrize("budget", [{"trials": 0}, {"trials": 9, "seconds": -1.0}])
def test_a_budget_of_nothing_is_refused(budget: dict[str, Any]) -> None:
    with pytest.raises(NormforgeError):
        Budget(**budget)


def test_compilation_runs_ahead_of_measurement(storage: BaseStorage) -> None:
    pool = FakePool()
    ahead: list[int] = []

    class Watching(FakeEvaluator):
        def evaluate(self, *arguments: Any) -> Result:
            ahead.append(pool.submitted - done[0])
            return super().evaluate(*arguments)

    done = [1]
    search(
        storage,
        Watching(),
        trials=30,
        pool=pool,
        on_progress=lambda event: done.__setitem__(0, event.done + 1),
    )
    assert Counter(ahead).most_common(1)[0][0] == pool.processes
    assert max(ahead) == pool.processes


def test_progress_tells_how_far_and_how_good(storage: BaseStorage) -> None:
    events: list[Progress] = []
    winner = won(search(storage, trials=25, on_progress=events.append))
    assert [event.done for event in events] == [*range(1, 26), 25]
    assert events[-1].phase == "finals"
    assert all(event.total == 25 and event.problem == PROBLEM for event in events)
    bests = [event.best_us for event in events if event.best_us is not None]
    assert bests == sorted(bests, reverse=True)
    assert sum(events[-1].counts.values()) == 25
    assert events[-1].counts == winner.counts


def test_a_trial_carries_what_a_reader_of_the_study_needs(storage: BaseStorage) -> None:
    pool = FakePool(
        broken=lambda config: config["strategy"] == "last_cta",
        spilling=lambda config: config["strategy"] == "semaphore",
    )
    search(storage, trials=60, pool=pool)
    trials = StudyLog(storage, NAME).trials()
    outcomes = {trial.user_attrs["outcome"] for trial in trials}
    assert {"ok", "nondeterministic", "compile_error", "resource"} <= outcomes
    for trial in trials:
        attributes = trial.user_attrs
        variant = make_variant(trial.params, PROBLEM)
        assert attributes["code"] == pool.code(variant)
        result = Result.from_json(attributes["result"])
        feasible = attributes["outcome"] == "ok"
        assert attributes["feasible"] is feasible
        assert (attributes["us"], attributes["floor_us"]) == (result.us, result.floor_us)
        assert trial.constraints == {"infeasible": 0.0 if feasible else 1.0}
        assert attributes["variant"].startswith(trial.params["strategy"])
        if result.ratio is None:
            assert trial.state == TrialState.PRUNED
            assert result.note
        else:
            assert trial.value == result.ratio
        if attributes["outcome"] == "compile_error":
            assert result.note == "rmsnorm_backward.cu(7): error: planted"
            assert attributes["cubin"] == ""
        else:
            assert attributes["registers"] > 0
            assert attributes["smem"] == variant.smem_bytes + STATIC_SMEM
            assert attributes["cubin"]
    assert optuna.load_study(study_name=NAME, storage=storage).metric_names == [METRIC]


def test_optuna_opens_the_journal_and_names_the_same_best(
    storage: BaseStorage, tmp_path: Path
) -> None:
    search(storage, trials=40)
    own = JournalStorage(JournalFileBackend(str(tmp_path / "studies.journal")))
    study = optuna.load_study(study_name=NAME, storage=own)
    assert study.best_value == min(r.ratio for r in records(storage) if r.feasible)


def test_one_cubin_with_one_launch_is_measured_once(storage: BaseStorage, tmp_path: Path) -> None:
    space = shrink(
        tmp_path,
        LEGAL.first(1)[0],
        strategy=["column_slices", "semaphore"],
        store_hint=["default", "streaming"],
    )
    evaluator = FakeEvaluator()
    pool = FakePool(unseen=("store_hint",))
    winner = won(search(storage, evaluator, pool=pool, space=space))
    done = records(storage, winner.study)
    assert [record.shared_with for record in done] == [None, 0, None, 2]
    assert [record.config for record in done[::2]] == evaluator.evaluated
    for record in done[1::2]:
        origin = done[record.shared_with or 0]
        assert (origin.identity, origin.cubin) == (record.identity, record.cubin)
        assert origin.result == record.result
    assert len(evaluator.finalists[0]) == 2, "one measurement is one finalist"


def test_one_cubin_with_another_launch_is_another_measurement(
    storage: BaseStorage, tmp_path: Path
) -> None:
    keep = {**LEGAL.first(1)[0], "strategy": "separate", "slice_columns": 32}
    space = shrink(tmp_path, keep, overlap=["dependent", "none"])
    evaluator = FakeEvaluator()
    search(storage, evaluator, space=space)
    assert len(evaluator.evaluated) == 2
    assert len({make_variant(config, PROBLEM).id for config in evaluator.evaluated}) == 1


def test_studies_that_must_not_mix_have_different_names() -> None:
    names = [
        NAME,
        study_name(replace(PROBLEM, M=8192), TARGET, "measured"),
        study_name(PROBLEM, replace(TARGET, name="h100"), "measured"),
        study_name(PROBLEM, replace(TARGET, sms=66), "measured"),
        study_name(PROBLEM, TARGET, "predicted"),
    ]
    assert len(set(names)) == len(names)
    assert NAME == "4096x1024:bf16@h200-132sm:measured"


def test_a_winner_survives_json(storage: BaseStorage) -> None:
    winner = won(search(storage, trials=30))
    assert Winner.from_json(winner.to_json()) == winner
    assert stored_winners(storage) == [winner]
    assert winner.evidence == "measured"
    assert winner.space_hash == SPACE.digest(PROBLEM)
    assert sum(winner.counts.values()) == winner.trials == 30
    assert winner.fastest_nondeterministic is not None


def test_equal_seeds_find_the_same_winner(tmp_path: Path) -> None:
    runs: list[Winner] = [
        won(search(open_storage(tmp_path / name), trials=50, seed=3)) for name in ("a", "b")
    ]
    assert replace(runs[0], date="") == replace(runs[1], date="")


def test_either_limit_ends_a_budget() -> None:
    both = Budget(trials=10, seconds=100.0)
    assert (both.used(5, 10.0), both.used(10, 1.0), both.used(1, 100.0)) == (0.5, 1.0, 1.0)
    assert Budget(trials=4).used(1, 1e9) == 0.25


def test_only_what_may_win_makes_others_slow(storage: BaseStorage) -> None:
    """The time that a worker compares with, to give up early, is of the best that may win."""
    asked: list[float | None] = []

    class Watching(FakeEvaluator):
        def evaluate(self, *arguments: Any) -> Result:
            asked.append(arguments[3])
            return super().evaluate(*arguments)

    def atomics_are_fast(variant: Variant) -> float:
        return cost(variant) - 0.5 * (variant.determinism == "none")

    search(storage, Watching(atomics_are_fast), trials=30)
    found = [record for record in records(storage) if record.shared_with is None]
    assert any(record.result.outcome == "nondeterministic" for record in found[:-1])
    best = None
    for record, given in zip(found, asked, strict=True):
        assert given == best
        if record.feasible:
            best = min(best or record.result.us or 0.0, record.result.us or 0.0)
