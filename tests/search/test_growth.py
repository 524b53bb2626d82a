"""Studies survive a space that grows: what is known counts, and what is new is tried first."""

from __future__ import annotations

import json
import lzma
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import BaseStorage, InMemoryStorage

from generator.kernels.geometry import Config
from generator.kernels.knobs import KNOBS
from generator.kernels.strategies import is_deterministic
from generator.kernels.variant import kernel_of
from generator.paths import GENERATED
from generator.space.legal_configs import LegalConfigs
from generator.space.space import Space
from generator.studies.reader import read_studies
from generator.studies.records import StudyFacts, study_name, without_space
from generator.studies.storage import JOURNAL_NAME, open_storage
from generator.studies.study_log import StudyLog
from generator.target import find_target
from tests.support.growth import ADDED, old_study, space_of_before
from tests.support.samples import space_of
from tests.support.searches import NAME, killed_after, records, search, won
from tests.support.synthetic import (
    LEGAL,
    PROBLEM,
    SPACE,
    TARGET,
    FakeEvaluator,
    make_winner,
    shrink,
)

pytestmark = pytest.mark.usefixtures("quick_proposals")


@pytest.fixture(scope="module")
def before() -> Space:
    return space_of_before()


def complete(config: Config) -> Config:
    return LEGAL.complete(config)


def keys(configs: Iterable[Config]) -> set[tuple[int | str, ...]]:
    return {LEGAL.key(complete(config)) for config in configs}


def added_in(config: Config) -> set[tuple[str, int | str]]:
    return ADDED & set(complete(config).items())


@pytest.mark.parametrize(
    ("evidence", "where"),
    [("measured", "journal"), ("predicted", "sqlite"), ("measured", "memory")],
)
def test_a_space_that_grew_measures_nothing_again_and_tries_the_new_values_first(
    evidence: str, where: str, before: Space, tmp_path: Path
) -> None:
    storage: BaseStorage = InMemoryStorage()
    if where != "memory":
        url = f"sqlite:///{tmp_path}/studies.db"
        storage = open_storage(url if where == "sqlite" else tmp_path / JOURNAL_NAME)
    search(storage, FakeEvaluator(evidence=evidence), trials=40, space=before)
    name = study_name(PROBLEM, TARGET, evidence)
    known = keys(record.config for record in records(storage, name))
    assert len(known) == 40 and not any(added_in(r.config) for r in records(storage, name))

    evaluator = FakeEvaluator(evidence=evidence)
    winner = won(search(storage, evaluator, trials=60, seed=1))
    assert optuna.get_all_study_names(storage) == [name]
    assert not keys(evaluator.evaluated) & known
    tried = [record.config for record in records(storage, name)]
    assert len(keys(tried)) == len(tried) == 60
    assert winner.trials == 60 and winner.space_hash == SPACE.digest(PROBLEM)
    first = tried[40 : 40 + len(ADDED)]
    assert set().union(*map(added_in, first)) == ADDED
    assert all(added_in(config) for config in first)


def test_a_killed_search_goes_on_with_the_new_values(storage: BaseStorage, before: Space) -> None:
    search(storage, trials=40, space=before)
    search(storage, trials=41)
    search(storage, trials=43)
    found = [added_in(record.config) for record in records(storage)[40:]]
    assert set().union(*found) == ADDED and all(found)


def test_a_search_that_all_trials_were_of_one_space_tries_no_value_first(
    storage: BaseStorage,
) -> None:
    search(storage, trials=30)
    search(storage, trials=36)
    assert {record.origin for record in records(storage)[30:]} == {"search"}  # not overhead again


def test_what_was_found_in_the_space_of_before_is_the_answer_of_todays(
    storage: BaseStorage, before: Space
) -> None:
    first = won(search(storage, trials=40, space=before))
    assert "arrival" not in first.config
    evaluator = FakeEvaluator()
    winner = won(search(storage, evaluator, trials=40))
    assert evaluator.evaluated == evaluator.finalists == []
    assert winner.config == complete(first.config) and len(winner.config) == len(SPACE.knobs)
    assert (winner.variant, winner.date) == (first.variant, first.date)


def test_what_a_space_lost_stays_known_and_is_no_candidate(
    storage: BaseStorage, before: Space, tmp_path: Path
) -> None:
    search(storage, trials=60)
    lost = sum(bool(added_in(record.config)) for record in records(storage))
    assert lost > 5
    evaluator = FakeEvaluator()
    winner = won(search(storage, evaluator, trials=61, space=before, seed=1))
    assert not added_in(winner.config) and winner.trials == 61
    assert len(records(storage)) == 61 + lost
    assert StudyLog(storage, NAME).outdated == frozenset()
    assert len(read_studies(tmp_path)[0].records) == 61 + lost
    (finalists,) = evaluator.finalists
    assert not any(added_in(config) for config in finalists)
    assert not any(map(added_in, evaluator.evaluated))


def test_a_winner_of_a_narrow_space_does_not_answer_for_the_whole(
    storage: BaseStorage, tmp_path: Path
) -> None:
    best = won(search(storage, trials=40)).config
    worst = max((r for r in records(storage) if r.feasible), key=lambda r: r.ratio)
    narrow = shrink(tmp_path, worst.config)
    found = won(search(storage, trials=40, space=narrow))
    assert found.config == worst.config != best
    evaluator = FakeEvaluator()
    assert won(search(storage, evaluator, trials=1)).config == best
    assert evaluator.evaluated == []


# ---- Studies of before, one for each space -------------------------------------------------------


def test_studies_of_every_space_are_continued_in_one(
    storage: BaseStorage, before: Space, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = old_study(storage, "aaaa", before, 30, seed=1)
    newer = old_study(storage, "bbbb", SPACE, 25, seed=2)
    monkeypatch.setattr(StudyLog, "add", killed_after(7, StudyLog.add))
    with pytest.raises(KeyboardInterrupt):
        search(storage, trials=200)
    monkeypatch.undo()
    assert len(read_studies(tmp_path)) == 2, "both, as long as one lacks trials of the other"

    known = keys(record.config for record in (*older, *newer))
    evaluator = FakeEvaluator()
    winner = won(search(storage, evaluator, trials=len(older) + len(newer) + 10))
    assert winner.study == f"{NAME}:bbbb"
    assert optuna.get_all_study_names(storage) == [f"{NAME}:aaaa", f"{NAME}:bbbb"]
    assert not keys(evaluator.evaluated) & known
    done = records(storage, winner.study)
    assert [r.config for r in done[:25]] == [r.config for r in newer]
    assert [r.config for r in done[25:55]] == [r.config for r in older]
    assert [r.result for r in done[:55]] == [r.result for r in (*newer, *older)]
    for number, record in enumerate(done):
        if record.shared_with is not None:
            assert record.shared_with < number
            assert done[record.shared_with].identity == record.identity
    elapsed = [record.elapsed for record in done]
    assert elapsed == sorted(elapsed)
    assert elapsed[54] == pytest.approx(newer[-1].elapsed + older[-1].elapsed)
    (study,) = read_studies(tmp_path)
    assert study.name == winner.study and len(study.records) == len(done)

    log = StudyLog(storage, NAME)
    log.take_over()
    assert len(log.trials()) == len(done), "nothing twice"


def test_a_predicted_incumbent_of_the_same_model_has_either_name(storage: BaseStorage) -> None:
    name = study_name(PROBLEM, TARGET, "predicted")
    kinds = [config for config in LEGAL.reduction_kinds if is_deterministic(config)]
    for study, stays in ((f"{name}:aaaa", True), (name, True), (f"{name[:-1]}:aaaa", False)):
        known = make_winner(kinds[-1], evidence="predicted", study=study)
        evaluator = FakeEvaluator(evidence="predicted")
        search(InMemoryStorage(), evaluator, trials=8, known_winners=[known])
        assert (known.config in evaluator.finalists[0][:1]) is stays


# ---- The committed studies -----------------------------------------------------------------------


def trials_of(gpu: str) -> tuple[list[str], list[tuple[int, dict[str, Any]]]]:
    """The names of studies, and the config of every trial with the number of its study."""
    names, trials = [], []
    choices: dict[str, Sequence[Any]] = {}
    path = GENERATED / gpu / f"{JOURNAL_NAME}.xz"
    with lzma.open(path, "rt", encoding="utf-8") as journal:
        for entry in map(json.loads, journal):
            if entry["op_code"] == 0:
                names.append(entry["study_name"])
            if entry["op_code"] != 4:
                continue
            for text in entry["distributions"].values():
                if text not in choices:
                    choices[text] = json.loads(text)["attributes"]["choices"]
            of = entry["distributions"]
            config = {k: choices[of[k]][int(i)] for k, i in entry["params"].items()}
            trials.append((entry["study_id"], config))
    return names, trials


@pytest.mark.parametrize(
    ("gpu", "evidence"), [("h200", "measured"), ("h100", "measured"), ("gb200", "predicted")]
)
def test_no_committed_trial_is_orphaned(gpu: str, evidence: str) -> None:
    """Each is in the one study that a search of its problem opens, and templates and space still
    have its config (its code is that of tests/kernels/test_code_digest.py)."""
    names, trials = trials_of(gpu)
    target = find_target(gpu)
    opened = Counter(without_space(name) for name in names)
    assert set(opened.values()) == {1}
    legal, domains = [], []
    for name in names:
        facts = StudyFacts.of_name(name)
        assert facts is not None
        assert without_space(name) == study_name(facts.problem, target, evidence)
        space = space_of(facts.problem.operation)
        legal.append(LegalConfigs(space, facts.problem, target))
        domains.append({k.name: {*k.values} | {*KNOBS[k.name].domain} for k in space.knobs})
    for number, config in trials:
        full = legal[number].complete(config)
        assert [*full] == [*domains[number]]
        assert all(full[name] in domain for name, domain in domains[number].items())
    for number, config in trials[::20]:
        assert legal[number].today(config) is not None
        assert kernel_of(config, legal[number].problem).id
