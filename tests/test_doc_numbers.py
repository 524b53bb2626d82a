"""Measured numbers of the pages are those of the committed results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.pages import BLOCK, pages, updated

MEASURED = re.compile(r"(?<![\w.-])\d+\.\d+(?![\w.]*\d)|\d+ %|\d+ µs")

# Pages on which nothing measured may stand outside of a generated block.
CHECKED = ["README.md", "index.md", "faq.md", "performance.md", "accuracy.md"]

# What looks measured there and is not: versions, and bounds that the text sets itself.
STATED = {
    "README.md": {"3.10", "2.9"},
    "index.md": {"2.9"},
    "performance.md": {"13.0", "2.11", "95 %"},
    "accuracy.md": {"1.1"},
}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_generated_blocks_are_current(page: Path) -> None:
    """`python -m benchmarks.pages` writes them."""
    assert page.read_text() == updated(page.read_text())


@pytest.mark.parametrize("name", CHECKED)
def test_other_text_states_no_measurement(name: str) -> None:
    page = next(page for page in pages() if page.name == name)
    text = re.sub(r"https?://\S+|`[^`]*`|^    .*$", "", BLOCK.sub("", page.read_text()), flags=re.M)
    assert set(MEASURED.findall(text)) <= STATED.get(name, set())


def test_every_block_is_on_a_page() -> None:
    from benchmarks.pages import BLOCKS

    used = {match[2] for page in pages() for match in BLOCK.finditer(page.read_text())}
    assert used == set(BLOCKS)


def test_a_changed_number_is_seen() -> None:
    page = next(page for page in pages() if page.name == "performance.md").read_text()
    planted = page.replace("| strategy | column_slices", "| strategy | mailbox", 1)
    assert planted != page and updated(planted) == page


def test_a_measurement_is_recognised() -> None:
    said = "QuACK 0.6.5 takes 1.41 times as long, 3 % more, 12 µs; 4096x4096, 20 runs"
    assert set(MEASURED.findall(said)) == {"1.41", "3 %", "12 µs"}
