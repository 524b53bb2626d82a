"""The files of users' operations: what is known of them without PyTorch."""

from __future__ import annotations

from pathlib import Path

from generator.paths import SEARCH_SPACES, TEMPLATES
from normforge import operations

OWN_OPERATIONS = "NORMFORGE_OPERATIONS"
"""The environment variable with the files of a user's operations, for the processes of a run."""
FILES: dict[str, Path] = {}
"""The files of a user's operations by their names."""


def template_of(operation: str) -> Path:
    """The file of an operation's template."""
    if operation in FILES:
        return FILES[operation].with_name(f"{operation}.cu.j2")
    return TEMPLATES / f"{operation}.cu.j2"


def space_of(operation: str) -> Path:
    """The file of an operation's search space: its own, or that of operations like it."""
    beside = FILES[operation].with_name(f"{operation}.yaml") if operation in FILES else None
    for path in (beside, SEARCH_SPACES / f"{operation}.yaml"):
        if path is not None and path.exists():
            return path
    sums = operations.signature_of(operation).column_sums
    like = (
        name
        for name, known in operations.OPERATIONS.items()
        if name not in FILES and known.signature.column_sums == min(sums, 2)
    )
    return SEARCH_SPACES / f"{next(like, 'rows_alone')}.yaml"
