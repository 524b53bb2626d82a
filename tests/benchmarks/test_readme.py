"""benchmarks/README.md names every command and every result."""

from __future__ import annotations

import re

from benchmarks.pages.text import RESULTS, read
from generator.paths import REPOSITORY

FOLDER = REPOSITORY / "benchmarks"
README = (FOLDER / "README.md").read_text()
MADE, MADE_BY_HAND = README.split("## Files that no command makes any more")


def names(text: str) -> set[str]:
    return set(re.findall(r"`([\w.]+\.(?:json|json\.xz|md|svg))`", text))


def test_every_result_is_in_a_table() -> None:
    assert names(README) == {path.name for path in RESULTS.iterdir()}
    assert not names(MADE) & names(MADE_BY_HAND)


def test_a_result_without_a_command_says_how_it_was_measured() -> None:
    for name in names(MADE_BY_HAND):
        assert read(name.partition(".")[0])["what"]


def test_every_command_is_in_a_table() -> None:
    files = {path.stem for path in FOLDER.glob("*.py") if "__main__" in path.read_text()}
    packages = {path.parent.name for path in FOLDER.glob("*/__main__.py")} - {"pages"}
    named = re.findall(r"^\|[^|]*\| `(\w+)", MADE, flags=re.M)
    assert set(named) == files | packages
