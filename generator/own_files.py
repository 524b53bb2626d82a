"""The files of users' operations: what is known of them without PyTorch."""

from __future__ import annotations

from functools import cache
from itertools import chain
from pathlib import Path

from generator.paths import SEARCH_SPACES, template_named
from normforge import operations

OWN_OPERATIONS = "NORMFORGE_OPERATIONS"
"""The environment variable with the files of a user's operations, for the processes of a run."""
FILES: dict[str, Path] = {}
"""The files of a user's operations by their names."""


def template_of(operation: str) -> Path:
    """The file of an operation's template."""
    if operation in FILES:
        return FILES[operation].with_name(f"{operation}.cu.j2")
    return template_named(f"{operation}.cu.j2")


@cache
def may_add_early(operation: str) -> bool:
    """Tell whether an operation's template can add to the sums over the rows before the row sum."""
    return "early_sums" in template_of(operation).read_text(encoding="utf-8")


def space_of(operation: str) -> Path:
    """The file of an operation's search space: its own, that of the first operation of the library
    with its tensors, or else of one with as many sums of a column."""
    beside = FILES[operation].with_name(f"{operation}.yaml") if operation in FILES else None
    for path in (beside, SEARCH_SPACES / f"{operation}.yaml"):
        if path is not None and path.exists():
            return path
    signature = operations.signature_of(operation)
    ours = {name: o.signature for name, o in operations.OPERATIONS.items() if name not in FILES}
    alike = (name for name, other in ours.items() if other == signature)
    sums = min(signature.column_sums, 2)
    counts = (name for name, other in ours.items() if sums and other.column_sums == sums)
    return SEARCH_SPACES / f"{next(chain(alike, counts), 'rows_alone')}.yaml"
