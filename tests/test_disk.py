"""Files that appear whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from generator.disk import replacing


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_a_file_is_for_whom_the_umask_says(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        with replacing(tmp_path / "new" / "file") as part:
            part.write_text("whole")
    finally:
        os.umask(before)
    (file,) = (tmp_path / "new").iterdir()
    assert (file.name, file.read_text(), file.stat().st_mode & 0o777) == ("file", "whole", mode)


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    with pytest.raises(ValueError, match="planted"), replacing(file) as part:
        part.write_text("half")
        raise ValueError("planted")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]
