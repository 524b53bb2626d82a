"""A journal of which only some studies are read: what they hold is what the whole journal says."""

from __future__ import annotations

import lzma
from pathlib import Path

import optuna
import pytest
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from generator.cli.pack import pack as pack_short
from generator.errors import NormforgeError
from generator.studies.excerpt import digest_of, read_journal
from generator.studies.reader import describe_location
from generator.studies.storage import JOURNAL_NAME, open_storage

NAMES = ["one", "two", "three"]


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Three studies whose trials take turns."""
    storage = open_storage(tmp_path / JOURNAL_NAME)
    studies = [optuna.create_study(study_name=name, storage=storage) for name in NAMES]
    for number in range(4):
        for place, study in enumerate(studies):
            study.add_trial(create_trial(value=10.0 * place + number, user_attrs={"n": number}))
            study.set_user_attr("latest", number)
    return tmp_path / JOURNAL_NAME


def pack(journal: Path) -> Path:
    packed = journal.with_name(f"{journal.name}.xz")
    packed.write_bytes(lzma.compress(journal.read_bytes(), preset=0))
    return packed


def trials(storage: BaseStorage, name: str) -> list[FrozenTrial]:
    return storage.get_all_trials(storage.get_study_id_from_name(name))


def values(storage: BaseStorage, name: str) -> list[float | None]:
    return [trial.value for trial in trials(storage, name)]


@pytest.mark.parametrize("packed", [False, True])
def test_what_is_wanted_is_as_in_the_whole_journal_and_the_rest_is_left_out(
    journal: Path, packed: bool
) -> None:
    content = journal.read_bytes()
    whole = open_storage(journal)
    some = read_journal(pack(journal) if packed else journal, lambda name: name == "two")
    assert [s.study_name for s in some.get_all_studies()] == NAMES
    number = whole.get_study_id_from_name("two")
    assert some.get_study_id_from_name("two") == number
    assert some.get_study_user_attrs(number) == whole.get_study_user_attrs(number)
    assert values(some, "two") == values(whole, "two") == [10.0, 11.0, 12.0, 13.0]
    assert [t.user_attrs for t in trials(some, "two")] == [{"n": n} for n in range(4)]
    assert values(some, "one") == values(some, "three") == []
    assert journal.read_bytes() == content


def test_an_excerpt_is_not_written_to(journal: Path) -> None:
    content, some = journal.read_bytes(), read_journal(journal, lambda name: name == "two")
    with pytest.raises(RuntimeError, match="an excerpt is there to be read"):
        optuna.create_study(study_name="four", storage=some)
    assert journal.read_bytes() == content


def test_a_journal_that_a_run_writes_comes_before_what_is_packed_beside_it(journal: Path) -> None:
    packed = pack(journal)
    assert describe_location(journal.parent) == str(journal)
    journal.unlink()
    assert describe_location(journal.parent) == str(packed)


def test_all_are_read_unless_somebody_asks_for_some(journal: Path) -> None:
    for name in NAMES:
        assert values(read_journal(journal), name) == values(open_storage(journal), name)


def test_the_first_records_are_the_studies_as_they_were(journal: Path) -> None:
    """Though others follow, in a journal that was unpacked, and packed again with other seals."""
    count, digest = digest_of(pack_short(journal.parent))
    storage = open_storage(journal)
    optuna.load_study(study_name="one", storage=storage).add_trial(create_trial(value=9.0))
    optuna.create_study(study_name="four", storage=storage)
    assert count == len(journal.read_bytes().splitlines()) - 2
    for make in (lambda: journal, lambda: pack_short(journal.parent)):
        path = make()
        assert digest_of(path, count) == (count, digest)
        assert digest_of(path)[0] == count + 2 and digest_of(path)[1] != digest
        was, now = read_journal(path, first=count), read_journal(path)
        assert [s.study_name for s in was.get_all_studies()] == NAMES
        assert values(was, "one") == [0.0, 1.0, 2.0, 3.0] and values(now, "one")[4:] == [9.0]
        assert values(read_journal(path, lambda name: name == "one", count), "one")[4:] == []


def test_a_name_that_was_taken_makes_no_study(journal: Path) -> None:
    """Two processes may have created a study at the same time: the second record is void."""
    storage = open_storage(journal)
    first = journal.read_bytes().splitlines()[0].split(b',"seal"')[0].replace(b"-", b"_") + b"}\n"
    with journal.open("ab") as file:
        file.write(first)
    late = optuna.create_study(study_name="late", storage=open_storage(journal))
    late.add_trial(create_trial(value=5.0))
    assert values(read_journal(journal, lambda name: name == "late"), "late") == [5.0]
    assert values(storage, "late") == [5.0]


@pytest.mark.parametrize("change", ["trial", "deleted"])
def test_records_that_need_the_whole_journal_get_it(journal: Path, change: str) -> None:
    """Another program wrote them: a trial is named by its number among all."""
    storage = open_storage(journal)
    if change == "trial":
        running = optuna.load_study(study_name="two", storage=storage).ask()
        storage.set_trial_user_attr(running._trial_id, "note", "looks good")
        storage.set_trial_state_values(running._trial_id, TrialState.COMPLETE, [7.0])
    else:
        storage.delete_study(storage.get_study_id_from_name("one"))
    some = read_journal(journal, lambda name: name == "two")
    assert values(some, "two") == values(open_storage(journal), "two")
    assert values(some, "three") == values(open_storage(journal), "three") != []


def test_the_first_records_end_where_they_do_though_the_whole_journal_is_needed(
    journal: Path,
) -> None:
    storage = open_storage(journal)
    two = optuna.load_study(study_name="two", storage=storage)
    storage.set_trial_state_values(two.ask()._trial_id, TrialState.COMPLETE, [7.0])
    count, _ = digest_of(journal)
    two.add_trial(create_trial(value=9.0))
    was = read_journal(journal, lambda name: name == "two", count)
    assert values(was, "two")[4:] == [7.0]


@pytest.mark.parametrize("wanted", ["one", "three"])
def test_damage_of_a_study_that_nobody_wants_is_told_too(journal: Path, wanted: str) -> None:
    journal.write_bytes(journal.read_bytes().replace(b'"value":12.0', b'"value":12.5'))
    for path in (journal, pack(journal)):
        with pytest.raises(NormforgeError, match=r"changed, doubled or lost") as caught:
            read_journal(path, lambda name: name == wanted)
        assert str(path) in str(caught.value)


def test_damage_behind_the_first_records_is_told_too(journal: Path) -> None:
    journal.write_bytes(journal.read_bytes().replace(b'"value":23.0', b'"value":23.5'))
    with pytest.raises(NormforgeError, match=r"changed, doubled or lost"):
        read_journal(journal, first=3)


def test_a_torn_last_record_is_passed_over_and_left_where_it_is(journal: Path) -> None:
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-40])
    assert values(read_journal(journal, lambda name: name == "three"), "three")
    assert journal.read_bytes() == whole[:-40]
