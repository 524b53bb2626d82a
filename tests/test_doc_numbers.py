"""Measured numbers in the tables of the pages are those of the committed results."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.pages.blocks import BLOCK, pages, updated


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_generated_blocks_are_current(page: Path) -> None:
    """`python -m benchmarks.pages` writes them."""
    assert page.read_text() == updated(page.read_text())


def test_every_block_is_on_a_page() -> None:
    from benchmarks.pages.blocks import BLOCKS

    used = {match[2] for page in pages() for match in BLOCK.finditer(page.read_text())}
    assert used == set(BLOCKS)


def test_a_changed_number_is_seen() -> None:
    page = next(page for page in pages() if page.name == "lab-notes.md").read_text()
    planted = page.replace("| `column_slices` | ", "| `column_slices` | 1", 1)
    assert planted != page and updated(planted) == page


def test_a_changed_docstring_is_seen() -> None:
    page = next(page for page in pages() if page.name == "api.md").read_text()
    planted = page.replace("- `need_dx`: False to skip dx.", "- `need_dx`: True to skip dx.", 1)
    assert planted != page and updated(planted) == page
