"""What the blocks of all pages share: results are read, tables are written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from generator.paths import REPOSITORY

RESULTS = REPOSITORY / "benchmarks" / "results"


def read(name: str) -> Any:
    """A committed results file, without its suffix."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
