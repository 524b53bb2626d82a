"""The command that packs studies."""

from __future__ import annotations

import lzma
import os
from pathlib import Path

import pytest

from generator.cli.pack import main, pack
from generator.errors import NormforgeError
from generator.studies.storage import JOURNAL_NAME, open_storage
from generator.studies.study_log import StudyLog
from generator.tuner.lifecycle import exclusive_run
from tests.support.searches import NAME, search, won

PACKED = f"{JOURNAL_NAME}.xz"


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / JOURNAL_NAME
    won(search(open_storage(path), trials=8))
    return path


def test_packed_studies_are_the_same_and_still_sealed(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flipped digit anywhere is found by the one seal that is left."""
    before = [
        (t.params, t.values, t.user_attrs) for t in StudyLog(open_storage(journal), NAME).trials()
    ]
    unpacked = journal.stat().st_size
    assert main([str(journal.parent)]) == 0
    assert files(journal.parent) == [PACKED]
    assert capsys.readouterr().out == f"{journal.parent / PACKED}\n"
    content = lzma.decompress((journal.parent / PACKED).read_bytes())
    assert content.count(b'"seal"') == 1 and len(content) < unpacked
    again = StudyLog(open_storage(journal), NAME).trials()
    assert [(t.params, t.values, t.user_attrs) for t in again] == before
    assert all(t.datetime_complete and not t.datetime_complete.microsecond for t in again)
    assert won(search(open_storage(journal), trials=12)).trials == 12  # the search goes on
    at = content.index(b'"elapsed":') + len(b'"elapsed":')
    journal.write_bytes(content[:at] + b"9" + content[at:])
    with pytest.raises(NormforgeError, match="was changed, doubled or lost"):
        open_storage(journal)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "nothing to pack"),
        ("", "nothing to pack"),
        ('{"op_code":0,"worker', "nothing to pack"),  # all that a killed run has written
        ("no journal\n", "corrupt"),
    ],
)
def test_what_cannot_be_packed_leaves_the_packed_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, said: str
) -> None:
    (tmp_path / PACKED).write_bytes(b"packed before")
    os.utime(tmp_path / PACKED, (0, 0))
    if content is not None:
        (tmp_path / JOURNAL_NAME).write_text(content)
    before = files(tmp_path)
    assert main([str(tmp_path)]) == 2
    assert said in capsys.readouterr().err
    assert files(tmp_path) == before
    assert (tmp_path / PACKED).read_bytes() == b"packed before"


def test_studies_that_a_run_writes_are_not_packed(journal: Path) -> None:
    with exclusive_run(journal.parent), pytest.raises(NormforgeError, match="another run writes"):
        pack(journal.parent)
    assert PACKED not in files(journal.parent)


def test_a_journal_does_not_replace_newer_studies(journal: Path) -> None:
    """After a `git pull`, an earlier run may have unpacked older studies."""
    packed = journal.parent / PACKED
    packed.write_bytes(b"newer")
    os.utime(journal, (0, 0))
    with pytest.raises(NormforgeError, match="is newer than"):
        pack(journal.parent)
    assert packed.read_bytes() == b"newer" and journal.exists()
