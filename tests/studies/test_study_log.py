"""A study's finals and trials, also after a kill in the middle."""

from __future__ import annotations

import errno
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import IntDistribution
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, create_trial

from generator.errors import NormforgeError
from generator.kernels.strategies import is_deterministic
from generator.studies import outage
from generator.studies.reader import read_studies
from generator.studies.records import Record
from generator.studies.storage import JOURNAL_NAME, open_storage
from generator.studies.study_log import StudyLog, stored_winners
from tests.support.searches import DETERMINISTIC, NAME, killed_after, search, won
from tests.support.synthetic import LEGAL, make_winner, timed

WINNER = make_winner(DETERMINISTIC[0])


def test_a_kill_while_finals_are_kept_leaves_them_to_be_held_again(
    storage: BaseStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The finals do not count as over, whichever part was written last."""
    log = StudyLog(storage, NAME)
    original = optuna.Study.set_user_attr
    left = 0

    def killed(self: optuna.Study, key: str, value: Any) -> None:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        original(self, key, value)

    monkeypatch.setattr(optuna.Study, "set_user_attr", killed)
    for written in range(4):
        left = written
        with pytest.raises(KeyboardInterrupt):
            log.save_finals(WINNER, [], 7, {})
        assert log._attributes().get("trials_at_finals") is None
    left = 4
    log.save_finals(WINNER, [], 7, {})
    assert (log.winner, log.trials_at_finals) == (WINNER, 7)


def test_a_trial_that_may_not_win_is_shown_as_one(storage: BaseStorage) -> None:
    (free,) = [config for config in LEGAL.reduction_kinds if not is_deterministic(config)][:1]
    for config, feasible in ((DETERMINISTIC[0], True), (free, False)):
        record = Record(config, "some", timed(1.0), "random", 0.0)
        assert record.feasible is feasible
        assert record.attributes()["feasible"] is feasible


def test_the_last_finals_say_who_won(storage: BaseStorage) -> None:
    log, other = StudyLog(storage, NAME), make_winner(DETERMINISTIC[1])
    for winner in (None, WINNER, other, None, WINNER):
        log.save_finals(winner, [], 1, {})
        assert StudyLog(storage, NAME).winner == winner


def test_seconds_of_an_older_study_count_once_though_the_copy_was_interrupted(
    storage: BaseStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in ((f"{NAME}:aaaa", (1.0, 5.0, 9.0)), (f"{NAME}:bbbb", (2.0, 4.0))):
        for elapsed in seconds:
            StudyLog(storage, name).add(create_trial(value=1.0, user_attrs={"elapsed": elapsed}))
    log, add = StudyLog(storage, NAME), StudyLog.add
    for copied in (2, 0):
        monkeypatch.setattr(StudyLog, "add", killed_after(copied, add))
        with pytest.raises(KeyboardInterrupt):
            log.take_over()
    monkeypatch.setattr(StudyLog, "add", add)
    log.take_over()
    assert [trial.user_attrs["elapsed"] for trial in log.trials()] == [2.0, 4.0, 5.0, 9.0, 13.0]


def test_a_joined_trial_shares_with_the_number_that_the_other_has_here(
    storage: BaseStorage, tmp_path: Path
) -> None:
    def trial(n: int, shared_with: int | None = None) -> FrozenTrial:
        attributes = {"elapsed": 1.0, "shared_with": shared_with}
        knob = {"n": IntDistribution(0, 9)}
        return create_trial(value=1.0, params={"n": n}, distributions=knob, user_attrs=attributes)

    own, others = (
        StudyLog(one, NAME) for one in (storage, open_storage(tmp_path / "other" / JOURNAL_NAME))
    )
    own.add(trial(5))
    others.add(trial(0))
    others.add(trial(1, shared_with=0))
    assert own.join(others) == 2
    assert [t.user_attrs["shared_with"] for t in own.trials()] == [None, None, 1]


def test_trials_out_of_date_stay_marked(storage: BaseStorage) -> None:
    log = StudyLog(storage, NAME)
    for numbers in ([3, 1], [1, 3, 4], [2], []):
        log.mark_outdated(numbers)
        assert StudyLog(storage, NAME).outdated == frozenset(numbers)


def test_trials_out_of_date_are_not_read(storage: BaseStorage, tmp_path: Path) -> None:
    search(storage, trials=6)
    StudyLog(storage, NAME).mark_outdated([0, 4])
    (study,) = read_studies(tmp_path)
    kept = [t for t in StudyLog(storage, NAME).trials() if t.number in (1, 2, 3, 5)]
    assert [record.variant for record in study.records] == [t.user_attrs["variant"] for t in kept]


def test_a_study_of_an_unknown_operation_hides_no_other(
    storage: BaseStorage, tmp_path: Path
) -> None:
    """A later version of this program writes such a study."""
    winner = won(search(storage, trials=6))
    foreign = optuna.create_study(storage=storage, study_name=f"softmax_backward:{NAME}")
    shape = f"softmax_backward:{winner.problem}"
    foreign.set_user_attr("winner", winner.to_json() | {"problem": shape})
    assert stored_winners(storage) == [winner]
    (study,) = read_studies(tmp_path)
    assert study.name == NAME


def test_a_failing_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = StudyLog(open_storage(tmp_path / JOURNAL_NAME), NAME)

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(optuna.Study, "add_trial", full)
    with pytest.raises(NormforgeError, match=r"No space left .*finished trials are kept"):
        log.add(optuna.create_trial(values=[1.0]))


def test_an_sqlite_file_that_cannot_be_written_is_no_outage(tmp_path: Path) -> None:
    url = f"sqlite:///file:{tmp_path}/studies.db?uri=true"
    StudyLog(open_storage(url), NAME)
    log = StudyLog(open_storage(f"{url}&mode=ro"), NAME)
    started = time.monotonic()
    with pytest.raises(NormforgeError, match=r"\(attempt to write a readonly database\): finished"):
        log.mark_outdated([1])
    assert time.monotonic() - started < outage.MAX_OUTAGE_SECONDS / 2


def test_an_sqlite_file_that_another_program_has_locked_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(outage, "_RETRY_SECONDS", 0.05)
    log = StudyLog(open_storage(f"sqlite:///{tmp_path}/studies.db?timeout=0"), NAME)
    other = sqlite3.connect(tmp_path / "studies.db", check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.3, other.rollback)
    release.start()
    log.mark_outdated([1])
    assert release.finished.is_set()
    assert log.outdated == {1}
    assert capsys.readouterr().err == "Waiting for the database (database is locked).\n"
    other.close()
