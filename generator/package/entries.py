"""The entries of a package, and the outcome of writing it."""

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
        "gpu",
        "driver",
        "nvrtc",
        "space",
        "study",
        "date",
        "trials",
        "us",
        "floor_us",
        "ratio",
        "tie",
        "verified",
        "checks",
        "reason",
    }
)
"""Facts that every winner of the backward states about itself, as JSON values; more may be
added."""


BITS = "bits"
"""The key of a fact that a measured winner may state beside these: the digest of its outputs for
seeded inputs (generator.evaluate.verify.seeded), which are the same on every machine."""


def recorded_bits(result: Result) -> dict[str, str]:
    """Return what an entry states of a result's bits: nothing for a predicted result, and for one
    from before that was recorded."""
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
    return Problem(*shape, getattr(spec, "operation", RMSNORM_BACKWARD), spec.rotation)


@dataclass(frozen=True)
class Forwards:
    """The forward's kernels: those chosen for shapes, and those that take any row."""

    tuned: tuple[Entry, ...]
    fallback: tuple[CompiledForward, ...]


@dataclass(frozen=True)
class Emission:
    """The result of a call of `emit_package`. refused: predicted winners of the backward that would
    have replaced measured ones; replaced: shapes for which the package had another backward or
    forward, so that their bits may be others now."""

    package: Path
    refused: tuple[Problem, ...]
    replaced: tuple[str, ...]
