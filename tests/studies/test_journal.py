"""The storage of studies: torn, corrupt, packed and locked journals, full disks, databases."""

from __future__ import annotations

import lzma
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest
from optuna.distributions import BaseDistribution, json_to_distribution
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend

from generator.errors import NormforgeError
from generator.problem import Problem
from generator.studies.journal import SealedJournal
from generator.studies.storage import JOURNAL_NAME, open_storage
from generator.studies.study_log import StudyLog, stored_winners
from tests.support.searches import NAME, search, won
from tests.support.synthetic import (
    FakeEvaluator,
)

OPTUNAS_GRACE_SECONDS = 30
"""Seconds that Optuna's own locks wait for one that is left behind."""


def test_a_database_url_is_passed_through(tmp_path: Path) -> None:
    storage = open_storage(f"sqlite:///{tmp_path}/studies.db")
    winner = won(search(storage, trials=8))
    again = open_storage(f"sqlite:///{tmp_path}/studies.db")
    assert stored_winners(again) == [winner]


def test_a_database_that_cannot_be_opened_is_named_without_its_password() -> None:
    with pytest.raises(NormforgeError, match=r"nosuchdb://db\.local/studies") as caught:
        open_storage("nosuchdb://user:secret@db.local/studies")
    assert "secret" not in str(caught.value)


def test_a_full_disk_ends_the_search_with_a_sentence(
    storage: BaseStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: SealedJournal, logs: object) -> None:
        raise OSError(28, "No space left on device")

    search(storage, trials=5)
    monkeypatch.setattr(SealedJournal, "append_logs", full)
    with pytest.raises(NormforgeError, match="No space left on device"):
        search(storage, trials=10)


def test_studies_are_listed_without_copies_if_optuna_lets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that changes the list, or an attribute in it, changes no study in either case."""
    storage = open_storage(tmp_path / JOURNAL_NAME)
    search(storage, trials=4)
    search(storage, trials=4, problem=Problem.parse("4096x2048:bf16"))
    copied = JournalStorage.get_all_studies(storage)  # type: ignore[arg-type]
    with monkeypatch.context() as patched:
        patched.setattr("optuna.storages.journal._storage.copy.deepcopy", None)
        listed = storage.get_all_studies()
    assert listed == copied and len(listed) == 2 and all("winner" in s.user_attrs for s in listed)
    listed.pop().user_attrs.clear()
    listed[0].user_attrs["winner"] = "none"
    assert storage.get_all_studies() == copied
    StudyLog(open_storage(tmp_path / JOURNAL_NAME), copied[0].study_name).mark_outdated([2])
    assert storage.get_all_studies()[0].user_attrs["outdated"] == [2]
    monkeypatch.delattr(storage, "_replay_result")
    with pytest.raises(AttributeError, match="_replay_result"):  # Optuna was asked
        storage.get_all_studies()


def test_every_distribution_is_parsed_once_if_optuna_lets_it(
    storage: BaseStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers of the same journal see the same, whether it does or not."""
    journal = tmp_path / JOURNAL_NAME
    search(storage, trials=6)
    parsed: list[str] = []

    def counted(text: str) -> BaseDistribution:
        parsed.append(text)
        return json_to_distribution(text)

    module = "optuna.storages.journal._storage"
    monkeypatch.setattr(f"{module}.json_to_distribution", counted)
    plain = StudyLog(JournalStorage(JournalFileBackend(str(journal))), NAME).trials()
    several = len(parsed)
    parsed.clear()
    read = [StudyLog(open_storage(journal), NAME).trials() for _ in range(2)]
    assert len(parsed) == len(set(parsed)) < several
    monkeypatch.delattr(module)
    read.append(StudyLog(open_storage(journal), NAME).trials())
    assert all(trials == plain for trials in read)


def test_a_torn_last_record_costs_that_record_only(storage: BaseStorage, tmp_path: Path) -> None:
    journal = tmp_path / "studies.journal"
    search(storage, trials=6)
    whole = journal.read_bytes()
    start = whole.rstrip(b"\n").rfind(b"\n") + 1
    for end in (start + 1, start + 9, start + 30, (start + len(whole)) // 2, len(whole) - 1):
        journal.write_bytes(whole[:end])
        study = StudyLog(open_storage(journal), NAME)
        assert journal.read_bytes() == whole[:start]
        assert len(study.trials()) == 6
    for torn in (bytes(4096), whole[start : start + 5] + bytes(100), whole[start:-1] + bytes(7)):
        journal.write_bytes(whole[:start] + torn)
        assert len(StudyLog(open_storage(journal), NAME).trials()) == 6
        assert journal.read_bytes() == whole[:start]
    evaluator = FakeEvaluator()
    winner = won(search(open_storage(journal), evaluator, trials=6))
    assert evaluator.evaluated == []
    assert stored_winners(open_storage(journal)) == [winner]


@pytest.mark.parametrize(
    "content",
    [
        b"no journal at all",
        b"{}\n",
        b"[1, 2]\n",
        b'{"op_code":0,"worker_id":"a"\n{"op_code":1}\n',
        b'{"op_code":0,"worker_id":"a"}\n',
        b'{"op_code":99,"worker_id":"a"}\n',
        b"\x00\xff\xfe\x80" * 100,
        b"SQLite format 3\x00" + bytes(100) + b"\n",
    ],
)
def test_a_corrupt_journal_is_one_sentence_and_stays_as_it_is(
    tmp_path: Path, content: bytes
) -> None:
    journal = tmp_path / "studies.journal"
    journal.write_bytes(content)
    before = journal.stat().st_mtime_ns
    with pytest.raises(NormforgeError, match="corrupt") as caught:
        open_storage(journal)
    assert str(journal) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert journal.read_bytes() == content
    assert journal.stat().st_mtime_ns == before
    assert [path.name for path in tmp_path.iterdir()] == ["studies.journal"]


def test_damage_in_the_middle_is_reported_with_its_line(
    storage: BaseStorage, tmp_path: Path
) -> None:
    journal = tmp_path / "studies.journal"
    search(storage, trials=4)
    lines = journal.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2][:50] + b"\n"
    journal.write_bytes(b"".join(lines))
    with pytest.raises(NormforgeError, match="line 3 is no JSON"):
        open_storage(journal)


def test_a_line_that_is_doubled_lost_or_elsewhere_is_reported(
    storage: BaseStorage, tmp_path: Path
) -> None:
    journal = tmp_path / "studies.journal"
    search(storage, trials=4)
    lines = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) > 6
    changed = {
        "doubled": [*lines[:3], lines[2], *lines[3:]],
        "doubled at the end": [*lines, lines[-1]],
        "lost": [*lines[:3], *lines[4:]],
        "swapped": [*lines[:3], lines[4], lines[3], *lines[5:]],
    }
    for damage, content in changed.items():
        journal.write_bytes(b"".join(content))
        with pytest.raises(NormforgeError, match=r"changed, doubled or lost"):
            pytest.fail(f"{damage}: {open_storage(journal)}")


def test_changed_ends_of_lines_are_reported(storage: BaseStorage, tmp_path: Path) -> None:
    journal = tmp_path / "studies.journal"
    search(storage, trials=2)
    journal.write_bytes(journal.read_bytes().replace(b"\n", b"\r\n"))
    with pytest.raises(NormforgeError, match="line 1 ends in CRLF instead of LF"):
        open_storage(journal)


def test_a_flipped_bit_is_reported_wherever_it_is(storage: BaseStorage, tmp_path: Path) -> None:
    journal = tmp_path / "studies.journal"
    search(storage, trials=2)
    whole = journal.read_bytes()
    rng = random.Random(7)
    for place in rng.sample(range(len(whole) - 30), 300):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.randrange(8)
        journal.write_bytes(damaged)
        with pytest.raises(NormforgeError, match="corrupt"):
            pytest.fail(f"byte {place}: {open_storage(journal)}")


def test_a_journal_of_before_is_read_and_sealed_by_the_next_record(tmp_path: Path) -> None:
    journal = tmp_path / "studies.journal"
    search(JournalStorage(JournalFileBackend(str(journal))), trials=3)
    old = journal.read_bytes()
    assert b"seal" not in old
    search(open_storage(journal), trials=4)
    assert journal.read_bytes().startswith(old)
    assert len(StudyLog(open_storage(journal), NAME).trials()) == 4
    first = old[: old.index(b"\n") + 1]
    journal.write_bytes(first + journal.read_bytes())
    with pytest.raises(NormforgeError, match="changed, doubled or lost"):
        open_storage(journal)


def test_another_programs_records_are_read_and_sealed_by_the_next_one(
    storage: BaseStorage, tmp_path: Path
) -> None:
    journal = tmp_path / "studies.journal"
    search(storage, trials=3)
    other = optuna.load_study(
        study_name=NAME, storage=JournalStorage(JournalFileBackend(str(journal)))
    )
    other.set_user_attr("note", "looks good")
    search(storage, trials=4)
    again = open_storage(journal)
    assert len(StudyLog(again, NAME).trials()) == 4
    assert optuna.load_study(study_name=NAME, storage=again).user_attrs["note"] == "looks good"


def test_writers_of_one_journal_seal_each_others_records(tmp_path: Path) -> None:
    journal = tmp_path / "studies.journal"
    one, other = (optuna.create_study(storage=open_storage(journal)) for _ in range(2))
    for number in range(5):
        one.set_user_attr("n", number)
        other.set_user_attr("n", number)
    # One that was killed in the middle of a record stops neither.
    with journal.open("ab") as file:
        file.write(b'{"op_code":4,"wor')
    one.set_user_attr("n", 5)
    storage = open_storage(journal)
    assert [study.user_attrs["n"] for study in storage.get_all_studies()] == [5, 4]
    assert journal.read_bytes().count(b'"seal"') == 13


def test_a_write_that_failed_half_way_leaves_a_journal_that_can_be_continued(
    tmp_path: Path,
) -> None:
    journal = tmp_path / "studies.journal"
    study = optuna.create_study(storage=open_storage(journal))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (journal.stat().st_size + 50, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            study.set_user_attr("note", "x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    study.set_user_attr("note", "y")
    (found,) = open_storage(journal).get_all_studies()
    assert found.user_attrs == {"note": "y"}


def test_an_unusable_folder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NormforgeError, match="choose another output folder"):
        open_storage(tmp_path / "file" / "studies.journal")


@pytest.mark.parametrize("kind", ["symlink", "file"])
def test_locks_left_behind_by_a_kill_do_not_stop_the_next_run(tmp_path: Path, kind: str) -> None:
    journal = tmp_path / "studies.journal"
    lock = Path(f"{journal}.lock")  # the name that Optuna's own locks have
    if kind == "symlink":
        lock.symlink_to(journal)
    else:
        lock.touch()
    started = time.monotonic()
    search(open_storage(journal), trials=5)
    assert time.monotonic() - started < OPTUNAS_GRACE_SECONDS


def test_a_writer_killed_with_the_lock_in_hand_does_not_block(tmp_path: Path) -> None:
    journal = tmp_path / "studies.journal"
    open_storage(journal)
    hold = (
        "import fcntl, os, sys, time\n"
        f"handle = os.open({str(journal)!r}, os.O_RDWR)\n"
        "fcntl.flock(handle, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        process.kill()
    started = time.monotonic()
    search(open_storage(journal), trials=5)
    assert time.monotonic() - started < OPTUNAS_GRACE_SECONDS


def test_packed_journal_is_unpacked_when_the_journal_is_missing(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL_NAME
    optuna.create_study(storage=open_storage(path), study_name="kept")
    packed = path.with_name(path.name + ".xz")
    packed.write_bytes(lzma.compress(path.read_bytes()))
    path.unlink()

    assert optuna.get_all_study_names(open_storage(path)) == ["kept"]

    optuna.create_study(storage=open_storage(path), study_name="newer")
    assert optuna.get_all_study_names(open_storage(path)) == ["kept", "newer"]


def test_damaged_packed_journal_is_one_sentence_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL_NAME
    packed = path.with_name(path.name + ".xz")
    packed.write_bytes(b"no archive")

    with pytest.raises(NormforgeError, match="corrupt"):
        open_storage(path)

    assert packed.read_bytes() == b"no archive"
    assert not path.exists()


def test_a_record_is_on_the_disk_before_the_trial_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, int]] = []
    fsync = os.fsync

    def noted(handle: int) -> None:
        fsync(handle)
        synced.append((Path(f"/proc/self/fd/{handle}").readlink().name, os.fstat(handle).st_size))

    monkeypatch.setattr(os, "fsync", noted)
    journal = tmp_path / "folder" / JOURNAL_NAME
    storage = open_storage(journal)
    assert synced[0][0] == "folder", "a new journal has a name on the disk"
    study = optuna.create_study(storage=storage)
    for number in range(3):
        study.set_user_attr("n", number)
        assert synced[-1] == (JOURNAL_NAME, journal.stat().st_size)
