"""What goes into a package, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from generator.kernels.forward import (
    ForwardVariant,
)
from generator.kernels.nvrtc import Compiled
from generator.kernels.variant import Variant
from generator.problem import Problem

Made = tuple[ForwardVariant, Compiled]


@dataclass(frozen=True)
class ForwardEntry:
    """The chosen forward of one shape. evidence: `measured` or `predicted`; provenance: how it was
    chosen, as JSON values."""

    problem: Problem
    variant: ForwardVariant
    compiled: Compiled
    evidence: str
    provenance: dict[str, Any]


@dataclass(frozen=True)
class Forwards:
    """What goes into a package: chosen ones, and those that take any row."""

    tuned: tuple[ForwardEntry, ...]
    generic: tuple[Made, ...]


PROVENANCE_KEYS = frozenset(
    {
        *("gpu", "driver", "nvrtc", "space", "study", "date", "trials"),
        *("us", "floor_us", "ratio", "tie", "verified", "checks", "reason"),
    }
)
"""What every entry states about itself, as JSON values; more may be added."""


@dataclass(frozen=True)
class Entry:
    """One winner to emit. evidence: `measured` or `predicted`; provenance: PROVENANCE_KEYS."""

    problem: Problem
    variant: Variant
    compiled: Compiled
    evidence: str
    provenance: dict[str, Any]


@dataclass(frozen=True)
class Emission:
    """What a call of `emit_package` did. refused: predicted winners that would have replaced
    measured ones; kept: other problems that were in the package and stay."""

    package: Path
    written: tuple[Problem, ...]
    refused: tuple[Problem, ...]
    kept: tuple[Problem, ...]
