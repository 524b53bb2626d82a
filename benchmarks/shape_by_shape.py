"""The loop of the benchmarks that measure shape after shape: the results file is written after each
one, and a run that was stopped goes on with --resume."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.command import say
from benchmarks.results import Row, check_same, kept, write_json
from generator.problem import Problem


def measure_shapes(
    args: argparse.Namespace,
    until: float,
    problems: Sequence[Problem],
    document: dict[str, Any],
    measure: Callable[[Problem], Row | None],
    tell: Callable[[Row], str],
) -> tuple[list[Row], int]:
    """Return the rows of --out after measuring those that it lacks, and how many shapes are left:
    those that would probably not end in time, and those of which `measure` returns None.

    args: has out and resume. until: the end, on the monotonic clock. document: all but the rows,
    with an `environment`. measure: returns the row of a problem; its `shape` is added. tell: says a
    row in a line of progress. Raises NormforgeError where --resume finds rows that were measured
    otherwise, and what `measure` raises.
    """
    rows = {row["shape"]: row for row in _former(args, document)}
    longest, left = 0.0, 0
    for problem in problems:
        if str(problem) in rows:
            continue
        began = time.monotonic()
        row = None if began + longest > until else measure(problem)
        if row is None:
            left += 1
            continue
        longest = max(longest, time.monotonic() - began)
        rows[str(problem)] = row = {"shape": str(problem), **row}
        write_json(args.out, {**document, "rows": [*rows.values()]})
        say(tell(row))
    if left:
        say(f"{left} shapes are left: the same command with --resume measures them")
    return [*rows.values()], left


def _former(args: argparse.Namespace, document: dict[str, Any]) -> list[Row]:
    """Return the rows that --resume keeps, of which all facts but the date are the same."""
    if not args.resume:
        return []
    now = json.loads(json.dumps(document))
    environment = now.pop("environment")
    found = kept(args.out, environment, [name for name in environment if name != "date"])
    if found:
        check_same(args.out, found, now, now)
    return list(found.get("rows", ()))
