"""What goes into a package, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from generator.kernels.code_digest import AnyVariant
from generator.kernels.forward import CompiledForward
from generator.kernels.nvrtc import Compiled
from generator.problem import RMSNORM_BACKWARD, Problem
from generator.result import Result
from normforge.table import TunedOf

PROVENANCE_KEYS = frozenset(
    {
        *("gpu", "driver", "nvrtc", "space", "study", "date", "trials"),
        *("us", "floor_us", "ratio", "tie", "verified", "checks", "reason"),
    }
)
"""What every winner of the backward states about itself, as JSON values; more may be added."""


BITS = "bits"
"""What a measured winner may state beside: the digest of its outputs for seeded inputs
(generator.evaluate.verify.seeded), which are the same on every machine."""


def recorded_bits(result: Result) -> dict[str, str]:
    """What an entry states of a result's bits; nothing for one of before that was recorded, and for
    a predicted one."""
    bits = result.extra.get(BITS)
    return {BITS: bits} if bits else {}


@dataclass(frozen=True)
class Entry:
    """The chosen kernel of one shape. evidence: `measured` or `predicted`; provenance: how it was
    chosen, as JSON values (of the backward PROVENANCE_KEYS)."""

    problem: Problem
    variant: AnyVariant
    compiled: Compiled
    evidence: str
    provenance: dict[str, Any]


def problem_of(tuned: TunedOf[Any]) -> Problem:
    """The shape that a table has a tuned kernel for; a forward is of RMSNorm."""
    spec = tuned.kernel.spec
    shape = (tuned.M, tuned.N, tuned.dtype, tuned.weight_dtype, spec.offset, spec.residual)
    return Problem(*shape, getattr(spec, "operation", RMSNORM_BACKWARD))


@dataclass(frozen=True)
class Forwards:
    """The forward's kernels: those chosen for shapes, and those that take any row."""

    tuned: tuple[Entry, ...]
    fallback: tuple[CompiledForward, ...]


@dataclass(frozen=True)
class Emission:
    """What a call of `emit_package` did. refused: predicted winners of the backward that would have
    replaced measured ones; replaced: shapes for which the package had another backward or forward,
    so that their bits may be others now."""

    package: Path
    refused: tuple[Problem, ...]
    replaced: tuple[str, ...]
