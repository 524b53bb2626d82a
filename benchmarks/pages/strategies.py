"""Searches before and after the search space had kernels with a producer."""

from __future__ import annotations

from typing import Any

from benchmarks.pages.method import percent
from benchmarks.pages.text import read, table

FILE = "search_producer"


def replays() -> str:
    """The replay in three states of the search."""
    found = read(FILE)
    rows = []
    for row in found["replay"]:
        states = [row[state] for state in ("without", "with", "without_constants")]
        cells = [" → ".join(_cell(own, at) for own in states) for at in range(3)]
        rows.append((row["problem"], *cells))
    return table(("space", *map(str, found["after_trials"])), rows)


def _cell(own: dict[str, Any], at: int) -> str:
    return f"{own['reached'][at]:.4f}, {percent(own['close'][at])}"


def rules() -> str:
    """Return what was tried against searches that stay with one strategy."""
    rows = []
    for row in read(FILE)["rules"]:
        replay, made_up = row["replay"], row["made_up"]
        reached = f"{replay['reached']:.4f} ± {replay['error']:.4f}"
        cost = f"{made_up['cost']:.3f} ± {made_up['error']:.3f}"
        rows.append((row["rule"], reached, cost, f"{made_up['worst']:.3f}"))
    return table(("search", "replay", "made-up cost, mean", "worst"), rows)


STRATEGY_BLOCKS = {"producer_replay": replays, "producer_rules": rules}
