"""`tune.py join`: studies of machines that share nothing, in one folder."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import tune
from generator.studies.storage import JOURNAL_NAME, open_storage
from generator.studies.study_log import StudyLog
from tests.support.searches import NAME, quick_proposals, records, search, won


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two machines' results of one problem: they began with the same eight trials."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    with quick_proposals():
        won(search(open_storage(here / JOURNAL_NAME), trials=8))
        shutil.copytree(here, there)
        won(search(open_storage(here / JOURNAL_NAME), trials=12, seed=1))
        won(search(open_storage(there / JOURNAL_NAME), trials=20, seed=2))
    log = StudyLog(open_storage(there / JOURNAL_NAME), NAME)
    later = replace(won(log.winner), date="2100-01-01T00:00:00+00:00")
    log.save_finals(later, [], log.trials_at_finals, {"gpu": "theirs"})
    return here, there


def test_a_study_has_the_trials_of_both_and_the_later_finals(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    here, there = folders
    own, others = (StudyLog(open_storage(one / JOURNAL_NAME), NAME) for one in folders)
    before = [sorted(trial.params.items()) for trial in own.trials()]
    elapsed = max(trial.user_attrs["elapsed"] for trial in own.trials())
    own.mark_outdated([3])
    others.mark_outdated([5, 17])
    assert tune.main(["join", str(there), "--into", str(here)]) == 0
    assert capsys.readouterr().out == f"{there}: 12 trials in 1 studies\n"
    log = StudyLog(open_storage(here / JOURNAL_NAME), NAME)
    trials = log.trials()
    configs = [sorted(trial.params.items()) for trial in trials]
    assert configs[:12] == before
    assert configs[12:] == [sorted(trial.params.items()) for trial in others.trials()[8:]]
    for trial in trials[12:]:
        assert trial.user_attrs["elapsed"] >= elapsed
        if (first := trial.user_attrs["shared_with"]) is not None:
            assert trials[first].user_attrs["cubin"] == trial.user_attrs["cubin"]
    assert log.outdated == {3, 5, 17 - 8 + 12}
    assert (log.winner, log.trials_at_finals) == (others.winner, 24)
    assert log.machine == {"gpu": "theirs"}
    log.mark_outdated([])

    assert tune.main(["join", str(there), "--into", str(here)]) == 0  # nothing comes twice
    assert len(records(open_storage(here / JOURNAL_NAME))) == 24
    with quick_proposals():
        won(search(open_storage(here / JOURNAL_NAME), trials=26))
    assert len(records(open_storage(here / JOURNAL_NAME))) == 26


def test_earlier_finals_do_not_replace_later_ones(folders: tuple[Path, Path]) -> None:
    here, there = folders
    winner = StudyLog(open_storage(there / JOURNAL_NAME), NAME).winner
    assert tune.main(["join", str(here), "--into", str(there)]) == 0
    log = StudyLog(open_storage(there / JOURNAL_NAME), NAME)
    assert (log.winner, log.trials_at_finals, len(log.trials())) == (winner, 20, 24)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("{there}", "--into"),
        ("--into {here}", "FOLDER"),
        ("{here} --into {here}", "cannot be joined into itself"),
        ("{here}/none --into {here}", "none has no studies.journal: name the --out of a run"),
    ],
)
def test_bad_input_is_one_sentence_and_changes_nothing(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str], arguments: str, said: str
) -> None:
    here, there = folders
    before = (here / JOURNAL_NAME).read_bytes()
    assert tune.main(["join", *arguments.format(here=here, there=there).split()]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1 and not captured.out
    assert (here / JOURNAL_NAME).read_bytes() == before


def test_what_will_be_refused_changes_nothing(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither a part of another GPU's studies comes, nor those of a folder before a damaged one."""
    here, there = folders
    before = (here / JOURNAL_NAME).read_bytes()
    other = there.parent / "other"
    StudyLog(open_storage(other / JOURNAL_NAME), NAME.replace("h200", "h100"))
    assert tune.main(["join", str(there), str(other), "--into", str(here)]) == 2
    assert "have studies of h100 and h200: join those of one GPU" in capsys.readouterr().err
    damaged = there.parent / "damaged" / "rmsnorm_backward" / "table.json"
    damaged.parent.mkdir(parents=True)
    damaged.write_text("{")
    shutil.copy(there / JOURNAL_NAME, damaged.parent.parent)
    assert tune.main(["join", str(there), str(damaged.parent.parent), "--into", str(here)]) == 2
    captured = capsys.readouterr()
    assert "holds no readable package" in captured.err and not captured.out
    assert (here / JOURNAL_NAME).read_bytes() == before
    (here / ".file").write_text("")
    assert tune.main(["join", str(there), "--into", str(here / ".file")]) == 2
    assert "--into" in capsys.readouterr().err
