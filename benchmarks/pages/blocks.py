"""Generated blocks: numbers from `<!-- numbers: NAME -->` to `<!-- end of numbers -->`, and a
function from `<!-- function: PATH -->` to `<!-- end of function -->`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from benchmarks.pages.accuracy import ACCURACY_BLOCKS
from benchmarks.pages.both_conditions import BOTH_CONDITIONS_BLOCKS
from benchmarks.pages.comparison import COMPARISON_BLOCKS
from benchmarks.pages.families import FAMILY_BLOCKS
from benchmarks.pages.functions import FUNCTION, described
from benchmarks.pages.invariance import INVARIANCE_BLOCKS
from benchmarks.pages.layers import LAYERS_BLOCKS
from benchmarks.pages.method import METHOD_BLOCKS
from benchmarks.pages.neighbours import NEIGHBOURS_BLOCKS
from benchmarks.pages.notes import NOTE_BLOCKS
from benchmarks.pages.performance import PERFORMANCE_BLOCKS
from benchmarks.pages.pipelines import PIPELINE_BLOCKS
from benchmarks.pages.shapes import SHAPE_BLOCKS
from benchmarks.pages.strategies import STRATEGY_BLOCKS
from benchmarks.pages.training import TRAINING_BLOCKS
from generator.paths import REPOSITORY

BLOCK = re.compile(r"(<!-- numbers: (\w+) -->\n).*?(<!-- end of numbers -->)", re.S)
BLOCKS: dict[str, Callable[[], str]] = {
    **ACCURACY_BLOCKS,
    **BOTH_CONDITIONS_BLOCKS,
    **COMPARISON_BLOCKS,
    **TRAINING_BLOCKS,
    **FAMILY_BLOCKS,
    **INVARIANCE_BLOCKS,
    **LAYERS_BLOCKS,
    **NEIGHBOURS_BLOCKS,
    **METHOD_BLOCKS,
    **NOTE_BLOCKS,
    **PERFORMANCE_BLOCKS,
    **PIPELINE_BLOCKS,
    **SHAPE_BLOCKS,
    **STRATEGY_BLOCKS,
}


def pages() -> list[Path]:
    """Every page that may hold numbers."""
    return [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def updated(page: str) -> str:
    """A page with its blocks written anew. Raises LookupError for what has an unknown name."""
    page = BLOCK.sub(lambda match: f"{match[1]}{BLOCKS[match[2]]()}\n{match[3]}", page)
    return FUNCTION.sub(lambda match: f"{match[1]}{described(match[2])}\n{match[3]}", page)
