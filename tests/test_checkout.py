"""Files that are compared byte for byte, in a checkout whose git changes the ends of lines."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from generator.paths import REPOSITORY

CONTENT = {
    "table.json": b'{\n  "format": 1\n}\n',
    "kernel.cu": b"void f() {\n}\n",
    "cubins.tar.xz": b"text\nthat looks like\r\ntext\n",
    "plot.png": b"\x89PNG\r\n\x1a\n",
}


def test_no_checkout_changes_the_ends_of_lines(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    shutil.copy(REPOSITORY / ".gitattributes", ours)
    for name, content in CONTENT.items():
        (ours / name).write_bytes(content)
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "files"]):
        subprocess.run(["git", *command], cwd=ours, check=True)
    subprocess.run(
        ["git", "clone", "-q", "-c", "core.autocrlf=true", str(ours), str(theirs)], check=True
    )
    assert {name: (theirs / name).read_bytes() for name in CONTENT} == CONTENT
