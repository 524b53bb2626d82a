"""Tables in text."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any


def columns(rows: Sequence[Sequence[Any]], right: Container[int] | None = None) -> str:
    """Rows of cells in aligned columns, the first row being the heading. right: places of the
    columns that are aligned to the right, default those of numbers."""
    aligned = []
    for i, column in enumerate(zip(*rows, strict=True)):
        cells = [str(cell) for cell in column]
        numbers = all(cell[:1].isdigit() or cell[:1] in "+-" for cell in cells[1:])
        align = str.rjust if (numbers if right is None else i in right) else str.ljust
        aligned.append([align(cell, max(map(len, cells))) for cell in cells])
    return "\n".join("  " + "  ".join(row).rstrip() for row in zip(*aligned, strict=True))
