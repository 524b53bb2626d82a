"""docs/extending.md is true: its changes, made in a copy of the repository, work as it says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from generator.emulate import find_compiler
from generator.emulate.build import DEFAULT_CACHE
from generator.paths import REPOSITORY
from generator.target import load_targets

FOLDERS = ("generator", "normforge", "templates", "search_spaces")
PAGE = (REPOSITORY / "docs" / "extending.md").read_text()
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")


def section(title: str) -> str:
    """The text under a heading."""
    return re.split(r"^## ", PAGE.split(f"## {title}\n", 1)[1], flags=re.M)[0]


def blocks(title: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", section(title), flags=re.S)


def files_said(title: str) -> int:
    found = re.search(r"^Files: (\d+)", section(title), flags=re.M)
    assert found is not None
    return int(found[1])


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Copy what a change may touch."""
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=ignored)
    built = DEFAULT_CACHE.relative_to(REPOSITORY)  # named by its content, so it stays right
    (tmp_path / built).mkdir(parents=True)
    for emulator in DEFAULT_CACHE.glob("emulator-*.o"):
        shutil.copy2(emulator, tmp_path / built)
    return tmp_path


def apply(title: str, folder: Path) -> set[str]:
    """Make the diffs of a section; the files that they change."""
    changed = set()
    for diff in blocks(title, "diff"):
        subprocess.run(
            ["git", "apply", "--unidiff-zero", "-"], input=diff, text=True, cwd=folder, check=True
        )
        changed |= set(re.findall(r"^\+\+\+ b/(\S+)", diff, flags=re.M))
    return changed


def emulate(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "generator.emulate", *arguments, "--schedules", "10"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_compiler
@pytest.mark.slow
def test_a_strategy(copy: Path) -> None:
    changed = apply("A strategy", copy)
    (fragment,) = blocks("A strategy", "cuda")
    (copy / "templates" / "dw" / "dw_relay.cuh").write_text(fragment)
    said = emulate(copy, "--strategy", "relay", "--shape", "64x1024:bf16")
    assert "1 different results" in said
    assert "no problem found" in said
    assert len(changed) + 1 == files_said("A strategy")


ROW_OF_SEMAPHORE = re.compile(
    r"^ *\"semaphore\": |Strategy\(\s*\"semaphore\"|\(\"dw_semaphore\", |values: \[.*\bsemaphore\b",
    re.M,
)
"""Matches what a file has for each strategy."""


def test_the_page_lists_every_file_that_has_a_row_for_each_strategy() -> None:
    """The files of the code and of the tests are searched."""
    files = (path for name in (*FOLDERS, "tests") for path in (REPOSITORY / name).rglob("*"))
    speaking = {
        str(path.relative_to(REPOSITORY))
        for path in files
        if path.suffix in (".py", ".yaml") and ROW_OF_SEMAPHORE.search(path.read_text())
    }
    said = set(re.findall(r"^\+\+\+ b/(\S+)", section("A strategy"), flags=re.M))
    assert speaking - {"tests/package/test_emit.py"} == said  # which has those of an older format


@needs_compiler
@pytest.mark.slow
def test_a_knob(copy: Path) -> None:
    changed = apply("A knob", copy)
    options = ("--strategy", "separate", "--set", "pipeline=direct", "--set", "row_unroll=2")
    said = emulate(copy, *options, "--shape", "64x1024:bf16")
    assert "no problem found" in said
    assert len(changed) == files_said("A knob")


def test_a_gpu(tmp_path: Path) -> None:
    (entry,) = blocks("A GPU", "yaml")
    path = tmp_path / "gpus.yaml"
    path.write_text((REPOSITORY / "search_spaces" / "gpus.yaml").read_text() + "\n" + entry)
    added = load_targets(path)["x100"]
    said = yaml.safe_load(entry)["x100"]
    assert (added.title, added.sms, added.arch) == (said["title"], said["sms"], said["arch"])
    assert added.has_bulk_copy
    assert files_said("A GPU") == 1


# ---- An operation --------------------------------------------------------------------------------

OF_LAYERNORM = re.compile(r"layer_?norm(?!_gated)", flags=re.I)  # a file of mamba_ssm
EXAMPLE = REPOSITORY / "examples" / "own_operation"


def texts(folder: Path) -> dict[str, str]:
    """Return the texts that a change may touch, by path."""
    found = (path for name in FOLDERS for path in (folder / name).rglob("*"))
    known = {".py", ".cpp", ".h", ".cuh", ".j2", ".yaml", ".css", ".js"}
    return {str(p.relative_to(folder)): p.read_text() for p in found if p.suffix in known}


def test_the_page_lists_every_file_that_speaks_of_layernorm() -> None:
    listed = re.findall(r"^\| `(\S+)` \|", section("An operation of the library"), flags=re.M)
    speaking = {path for path, text in texts(REPOSITORY).items() if OF_LAYERNORM.search(text)}
    assert set(listed) == speaking


def test_the_page_shows_the_example_as_it_is() -> None:
    """tests/operations/test_own_operation.py runs it."""
    (signature, _), (mathematics,) = (blocks("An operation", kind) for kind in ("python", "cuda"))
    assert signature == (EXAMPLE / "softmax_backward.py").read_text()
    assert mathematics == (EXAMPLE / "softmax_backward.cu.j2").read_text()
    assert files_said("An operation") == len(list(EXAMPLE.glob("softmax_backward*")))
