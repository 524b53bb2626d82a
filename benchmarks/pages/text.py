"""The common parts of pages: results are read, tables are written, plots are drawn."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from textwrap import fill
from typing import Any

from generator.disk import read_json
from generator.paths import GENERATED, REPOSITORY

RESULTS = REPOSITORY / "benchmarks" / "results"


def read(name: str) -> Any:
    """A committed results file, without its suffix. Long ones are packed, until a new run writes
    them."""
    return read_json(RESULTS / f"{name}.json")


def generated(*parts: str) -> Any:
    """A committed file below generated/."""
    return json.loads(GENERATED.joinpath(*parts).read_text(encoding="utf-8"))


def paragraph(said: str) -> str:
    """Wrap a paragraph to lines as long as those of the pages."""
    return fill(said, 120, break_long_words=False, break_on_hyphens=False)


NO_PLOT = "No plot: matplotlib is not installed."


def pyplot() -> Any:
    """Return Matplotlib's pyplot, for files alone; None where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def table(header: Sequence[str], rows: Iterable[Sequence[str]], others: str = "---") -> str:
    """A Markdown table. others: the rule below all columns but the first."""
    lines = [header, ["---", *[others] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
