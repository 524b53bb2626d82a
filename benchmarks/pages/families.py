"""Searches before and after they looked at many families."""

from __future__ import annotations

from typing import Any

from benchmarks.pages.method import percent
from benchmarks.pages.text import read, table

FILE = "search_families"


def largest_family() -> str:
    """Proposals by family at three shapes of the H100."""
    rows = []
    for shape in read(FILE)["shapes"]:
        recorded, before, after = shape["recorded"], shape["before"], shape["after"]
        pairs = [
            (before[name], after[name])
            for name in ("families", "best_of_h200_in_40", "best_of_h200")
        ]
        families, early, late = (_both(*map(_number, pair)) for pair in pairs)
        share = percent(recorded["largest"] / recorded["trials"])
        shares = _both(*(percent(own["largest"] / own["trials"]) for own in (before, after)))
        rows.append((shape["problem"], share, shares, families, early, late))
    header = (
        "shape",
        "largest family, recorded",
        "largest family",
        "families",
        "of the best, early",
    )
    return table((*header, "of the best, at all"), rows)


def before_and_after() -> str:
    """The replay with both searches."""
    found = read(FILE)
    rows = []
    for row in found["replay"]:
        known = "known" if row["search"].endswith("warm") else "not known"
        cells = [_both(*(_cell(row[when], at) for when in ("before", "after"))) for at in range(3)]
        rows.append((row["problem"], known, *cells))
    return table(("space", "other shapes", *map(str, found["after_trials"])), rows)


def _both(before: str, after: str) -> str:
    return f"{before} → {after}"


def _number(value: int | list[int]) -> str:
    return str(len(value) if isinstance(value, list) else value)


def _cell(own: dict[str, Any], at: int) -> str:
    return f"{own['reached'][at]:.4f}, {percent(own['close'][at])}"


def families_left_out() -> str:
    """Tabulate what made the replay worse."""
    rows = [
        (row["change"], str(row["searches"]), f"{row['without']:.4f}", f"{row['with']:.4f}")
        for row in read(FILE)["left_out"]
    ]
    return table(("change", "searches", "without it", "with it"), rows)


FAMILY_BLOCKS = {
    "families": largest_family,
    "families_replay": before_and_after,
    "families_left_out": families_left_out,
}
