"""How the committed results of a GPU changed from commit to commit."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean


@dataclass(frozen=True)
class Point:
    """One commit that changed the results. ratio: geometric mean over the `common` shapes that this
    commit and the newest one have both, and then: that of the newest one over the same shapes."""

    commit: str
    date: str
    shapes: int
    common: int
    ratio: float
    now: float


def history(results: Path) -> list[Point]:
    """The commits after which a results.json said something else, oldest first; none outside of a
    git checkout."""
    points: list[Point] = []
    newest: dict[str, float] = {}
    for line in _git(results.parent, "log", "--format=%h %as", "--", results.name).splitlines():
        commit, date = line.split()
        ratios = _ratios(_git(results.parent, "show", f"{commit}:./{results.name}"))
        newest = newest or ratios
        common = ratios.keys() & newest.keys()
        if common:
            then = geometric_mean([ratios[shape] for shape in common])
            now = geometric_mean([newest[shape] for shape in common])
            points.append(Point(commit, date, len(ratios), len(common), then, now))
    changed = [p for p, q in zip(points, [*points[1:], None], strict=False) if not _same(p, q)]
    return changed[::-1]


def _same(point: Point, before: Point | None) -> bool:
    return before is not None and (point.shapes, point.ratio) == (before.shapes, before.ratio)


def _ratios(text: str) -> dict[str, float]:
    """Ratios to the floor by shape, of shapes without a residual: their floor was once another."""
    found = {}
    for entry in json.loads(text)["shapes"] if text else []:
        weight = "" if entry["weight_dtype"] == entry["dtype"] else f":{entry['weight_dtype']}"
        shape = entry.get("shape") or f"{entry['M']}x{entry['N']}:{entry['dtype']}{weight}"
        if entry.get("ratio") and "residual" not in shape:
            found[shape] = entry["ratio"]
    return found


def _git(folder: Path, *arguments: str) -> str:
    """What git prints; "" where it is missing or refuses."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""
