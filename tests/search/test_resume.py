"""A search that goes on where another one stopped, and what a kill costs."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import BaseStorage

from generator.errors import NormforgeError
from generator.kernels.geometry import Config
from generator.kernels.knobs import KNOBS
from generator.paths import GENERATED
from generator.problem import Problem
from generator.result import Result
from generator.search.budget import Budget
from generator.search.sampler import LegalSampler
from generator.search.search import search_problem
from generator.space.legal_configs import LegalConfigs
from generator.space.load import load_space, space_file
from generator.space.space import Fixed
from generator.studies.storage import JOURNAL_NAME, open_storage
from generator.studies.study_log import StudyLog
from generator.target import find_target
from tests.support.searches import DETERMINISTIC, NAME, records, search, won
from tests.support.synthetic import (
    LEGAL,
    FakeEvaluator,
    FakePool,
    make_winner,
)

pytestmark = pytest.mark.usefixtures("quick_proposals")


def test_a_finished_study_answers_without_measuring(storage: BaseStorage, tmp_path: Path) -> None:
    first = won(search(storage, trials=30))
    evaluator = FakeEvaluator()
    again = search(open_storage(tmp_path / "studies.journal"), evaluator, trials=30)
    assert again == first
    assert evaluator.evaluated == []
    assert evaluator.finalists == []


@pytest.mark.parametrize("gpu", [pytest.param("h200", marks=pytest.mark.slow), "gb200"])
def test_committed_studies_answer_when_the_space_fixes_another_width(
    gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their names have a hash over what was fixed for all widths then. Their machine code is not
    made again here."""
    problem = Problem.parse("4096x4096:bf16", "rmsnorm_invariant_backward")
    journal = Path(shutil.copy(GENERATED / gpu / f"{JOURNAL_NAME}.xz", tmp_path)).with_suffix("")
    storage = open_storage(journal)
    names = optuna.get_all_study_names(storage)
    (name,) = (name for name in names if name.startswith(f"{problem}@{gpu}-"))
    space = load_space(space_file(problem.operation))
    log = StudyLog(storage, name)
    before = replace(won(log.winner), space_hash=space.digest(problem))  # as if chosen in today's
    log.save_finals(before, [], log.trials_at_finals, log.machine)
    codes = {record.variant: record.code for record in records(storage, name)}
    monkeypatch.setattr(FakePool, "code", lambda pool, variant: codes[variant.id])
    monkeypatch.setattr("generator.search.resume.still_made", lambda winner, pool: True)
    space = replace(space, fixed=(*space.fixed, Fixed((96,), ("bf16",), space.fixed[0].knobs)))
    evaluator = FakeEvaluator(evidence="measured" if ":measured:" in name else "predicted")
    winner = search_problem(
        LegalConfigs(space, problem, find_target(gpu)),
        FakePool(),
        evaluator,
        storage,
        Budget(trials=len(codes)),
    )
    assert winner is not None
    assert replace(winner, config=before.config) == before
    later = winner.config.keys() - before.config.keys()
    assert winner.config == {**before.config, **{knob: KNOBS[knob].neutral for knob in later}}
    assert evaluator.evaluated == evaluator.finalists == []


def test_finals_are_held_again_for_other_machine_code(storage: BaseStorage) -> None:
    first = won(search(storage, trials=30))
    pool = FakePool(version="another compiler")
    evaluator = FakeEvaluator()
    again = won(search(storage, evaluator, trials=30, pool=pool))
    assert len(evaluator.finalists) == 1
    assert again.cubin != first.cubin
    assert len(records(storage)) == 60, "the trials of the former code stay in the study"
    evaluator = FakeEvaluator()
    assert search(storage, evaluator, trials=30, pool=pool) == again
    assert evaluator.evaluated == evaluator.finalists == [], "and cost no finals again"


def test_what_does_not_compile_is_known_until_its_code_is_another(storage: BaseStorage) -> None:
    def broken(config: Config) -> bool:
        return config["strategy"] == "last_cta"

    first = won(search(storage, trials=30, pool=FakePool(broken=broken)))
    failed = first.counts["compile_error"]
    assert search(storage, trials=30, pool=FakePool(broken=broken)) == first
    assert len(records(storage)) == 30, "nothing was tried again"
    again = won(search(storage, trials=30, pool=FakePool(version="another compiler")))
    assert "compile_error" not in again.counts, "no failure counts of code that is gone"
    outcomes = [record.result.outcome for record in records(storage)]
    assert outcomes.count("compile_error") == failed
    outdated = StudyLog(storage, NAME).outdated
    assert outdated.issuperset(n for n, said in enumerate(outcomes) if said == "compile_error")


def test_a_larger_budget_continues_a_study(storage: BaseStorage) -> None:
    search(storage, trials=30)
    evaluator = FakeEvaluator()
    winner = won(search(storage, evaluator, trials=50))
    assert winner.trials == 50
    assert len(evaluator.evaluated) <= 20
    assert len({LEGAL.key(record.config) for record in records(storage)}) == 50


def test_finals_lost_to_a_kill_are_held_on_resume(storage: BaseStorage) -> None:
    class Killed(FakeEvaluator):
        def finals(self, *arguments: Any) -> list[Result]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(storage, Killed(), trials=20)
    evaluator = FakeEvaluator()
    assert won(search(storage, evaluator, trials=20)).trials == 20
    assert evaluator.evaluated == []
    assert len(evaluator.finalists) == 1


def test_a_resumed_search_draws_another_sequence(
    storage: BaseStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one would propose what is known, and the budget would go into repairs."""
    seeds = []

    class Watched(LegalSampler):
        def __init__(self, legal: LegalConfigs, seed: int, *more: Any) -> None:
            seeds.append(seed)
            super().__init__(legal, seed, *more)

    monkeypatch.setattr("generator.search.search.LegalSampler", Watched)
    for trials in (3, 5, 6):
        search(storage, trials=trials)
    assert len(set(seeds)) == 3


def test_seconds_before_a_resume_count(storage: BaseStorage) -> None:
    search(storage, FakeEvaluator(delay=0.05), trials=4)
    before = max(record.elapsed for record in records(storage))
    assert before > 0.15
    search(storage, FakeEvaluator(delay=0.05), trials=6)
    assert min(record.elapsed for record in records(storage)[4:]) > before


def test_a_winner_whose_machine_code_is_another_one_does_not_answer(storage: BaseStorage) -> None:
    """Its trials may all be up to date: it was an incumbent, made by other code."""
    search(storage, trials=8)
    stale = make_winner(DETERMINISTIC[0], trials=8, cubin="0" * 16)
    for trials in (8, 7):  # its finals may have had fewer trials than its budget
        StudyLog(storage, NAME).save_finals(replace(stale, trials=trials), [], 8, {})
        evaluator = FakeEvaluator()
        winner = won(search(storage, evaluator, trials=8))
        assert len(evaluator.finalists) == 1
        assert winner.cubin != stale.cubin


@pytest.mark.parametrize("field", ['"noisy":', '"origin":'])
def test_records_of_another_version_end_a_search_in_one_sentence(
    field: str, storage: BaseStorage, tmp_path: Path
) -> None:
    search(storage, trials=6)
    other = tmp_path / "other.journal"
    text = re.sub(r',"seal":"\w+"', "", (tmp_path / JOURNAL_NAME).read_text())
    other.write_text(text.replace(field, '"renamed":'))
    with pytest.raises(NormforgeError, match=rf"{re.escape(NAME)} cannot be read .* of another"):
        search(open_storage(other), trials=6)
