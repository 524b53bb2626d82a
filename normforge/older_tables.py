"""This module says in today's words what tables of the format before say of a kernel."""

from __future__ import annotations

from typing import Any

FORMAT_BEFORE = 4

_RENAMED = {"columns": "partial_columns", "rows_in_flight": "batch_rows"}
_WAYS = {
    "column_slices": "slices",
    "mailbox": "flagged_slices",
    "separate": "second_kernel",
    "last_cta": "last_cta",
    "none": "",
}
"""All strategies of that format but those of which a table says how they add."""


def todays_spec(said: dict[str, Any]) -> dict[str, Any]:
    """The fields of a KernelSpec from those of format 4, which left its way to add to the name of
    the strategy. Raises KeyError for a strategy that there was not, and where a field is missing.
    """
    spec = {_RENAMED.get(name, name): value for name, value in said.items()}
    accumulates, turns = spec.pop("accumulates"), spec.pop("turns")
    if accumulates or turns:
        return {**spec, "way": "on_arrival" if accumulates else "in_turns"}
    return {**spec, "way": _WAYS[said["strategy"]]}
