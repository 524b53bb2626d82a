"""Checkouts: their files, of which some are compared byte for byte, and the steps of CI in one."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

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


PROGRAM = """#!{bash}
line="${{0##*/}} $*"
echo "begin $line" >> {log}
case "$line" in
"{slow}"*) sleep 0.3 ;;
"python3 -m venv .venv")
    mkdir -p .venv/bin
    for name in pip ruff pyright mypy mkdocs python; do cp "$0" ".venv/bin/$name"; done ;;
"id -u") echo 0 ;;
"ls "*) exit 1 ;;
esac
echo "end $line" >> {log}
"""
"""A program that says when it begins and ends, and takes long where it is told to."""


@pytest.fixture
def steps(tmp_path: Path) -> Callable[[str], list[str]]:
    """The beginnings and ends of what .ci/run calls while one of its programs takes long."""

    def run(slow: str) -> list[str]:
        ci, programs, log = tmp_path / ".ci", tmp_path / "bin", tmp_path / "log"
        ci.mkdir()
        programs.mkdir()
        shutil.copy(REPOSITORY / ".ci" / "run", ci)
        for name in ("bash", "cp", "dirname", "mkdir", "mktemp", "rm", "sleep", "timeout"):
            (programs / name).symlink_to(str(shutil.which(name)))
        text = PROGRAM.format(bash=shutil.which("bash"), log=log, slow=slow)
        # No PostgreSQL and no browser is here, and the user may install them.
        planted = [programs / name for name in ("python3", "id", "ls", "apt-get")]
        for path in (ci / "pytorch_versions", *planted):
            path.write_text(text)
            path.chmod(0o755)
        subprocess.run([ci / "run"], env={"PATH": str(programs)}, check=True, timeout=60)
        return log.read_text().splitlines()

    return run


@pytest.mark.parametrize(
    ("job", "needs"),
    [
        ("pytorch_versions install", "pytorch_versions test"),
        ("pytorch_versions install", "python -m pytest"),
        ("apt-get install", "python -m pytest"),
        ("mypy", r"pip install .* \.ci/neighbours\.txt"),
    ],
)
def test_ci_waits_for_what_runs_in_the_background(
    steps: Callable[[str], list[str]], job: str, needs: str
) -> None:
    """Tests begin when nothing else runs, and mypy sees no libraries that are there for tests."""
    found = steps(job)
    begun = next(place for place, line in enumerate(found) if re.match(f"begin {needs}", line))
    begins, ends = (
        sum(line.startswith(f"{which} {job}") for line in found[:begun])
        for which in ("begin", "end")
    )
    assert begins == ends > 0
