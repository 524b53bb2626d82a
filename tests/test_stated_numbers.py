"""Numbers in sentences of the pages are those of the code, or of the committed results.

Tables of what was measured are generated (test_doc_numbers.py). On no page may a measurement stand
outside of a generated block and of the phrases in tests/support/stated_numbers.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.pages.blocks import BLOCK, pages
from benchmarks.pages.functions import FUNCTION
from tests.support.stated_numbers import PAGES, stated

WHOLE_NUMBERS = {
    *("README.md", "adopting.md", "architecture.md", "determinism.md"),
    *("extending.md", "generated-code.md", "lab-notes.md", "layernorm.md"),
    *("performance.md", "emulator.md", "tuning.md"),
}
"""Pages where whole numbers without a unit may stand as well: shapes, configs, lists, recipes."""

NO_NUMBER_OF_OURS = re.compile(
    r"exits? (?:with|code) \d+|from version 12|offsets of 64 bits|2√CTAs|^\d\. "
    r"|NVRTC 13\.0 and 13\.5|transformers \d\.\d+ and \d\.\d+"
    r"|the history has \d+ MB"
    r"|Triton \d\.\d+ (?:to|and) \d\.\d+(?: \(PyTorch [\d. to]+\))?",
    re.M,
)
"""Exit codes, other people's software, kinds of numbers, list items, the size of the repository."""


def page_text(name: str) -> str:
    """A page without code and generated blocks, but for the marks of code in its lines."""
    text = BLOCK.sub("", next(page for page in pages() if page.name == name).read_text())
    text = FUNCTION.sub("", text)
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    text = re.sub(r"https?://\S+|\]\([^)]*\)|^    .*$", "", text, flags=re.M)
    return NO_NUMBER_OF_OURS.sub("", text)


@pytest.mark.parametrize("name", PAGES)
def test_stated_numbers_are_those_of_the_code_and_the_results(name: str) -> None:
    text = " ".join(page_text(name).split())
    assert [phrase for phrase in stated(name) if phrase not in text] == []


def unchecked(name: str, text: str) -> str:
    """A page's text without the phrases that the test above compares, and without code."""
    text = " ".join(text.split())
    for phrase in stated(name):
        text = text.replace(phrase, "")
    return re.sub(r"`[^`]*`", "", text)


STRICT = [page.name for page in pages() if page.name not in WHOLE_NUMBERS]


@pytest.mark.parametrize("name", STRICT)
def test_no_other_number_is_stated(name: str) -> None:
    text = unchecked(name, page_text(name))
    assert re.findall(r".{0,30}(?<![\w.])\d[\d.,]*.{0,20}", text) == []


MEASUREMENT = re.compile(
    r"(?<![\w.])(?<!\w-)\d+\.\d+(?![\w.]*\d)"
    r"|(?<![A-Z\d])\d+ ?(?:%|[mµn]?s|[KMGT]?B|seconds|minutes|times)(?!\w)"
    r"|\d+ of (?:the |all )?\d+"
)
"""Decimal numbers, numbers with a unit, and shares."""


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_no_other_measurement_is_stated(page: Path) -> None:
    assert MEASUREMENT.findall(unchecked(page.name, page_text(page.name))) == []


def test_a_planted_measurement_is_found() -> None:
    name = "performance.md"
    said = "It is 1.41 of the floor or -0.5, 3% more, 12 µs, at 9 of 47 shapes."
    found = MEASUREMENT.findall(unchecked(name, f"{page_text(name)}\n{said}"))
    assert found == ["1.41", "0.5", "3%", "12 µs", "9 of 47"]


def test_what_was_not_measured_is_no_measurement() -> None:
    said = "4096x4096 rows, clusters of 8, 512 threads, 20 runs, sm_90a, fp16, version 13.0.1"
    assert MEASUREMENT.findall(said) == []
