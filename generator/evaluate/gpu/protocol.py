"""The messages between the tuner and a GPU worker.

No CUDA here: both sides import it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from generator.errors import NormforgeError
from generator.evaluate.gpu.noise import Block
from generator.problem import Problem
from generator.result import Result
from normforge.spec import ForwardSpec, KernelSpec


@dataclass(frozen=True)
class Candidate:
    """The parts of a variant that the worker needs: it gets machine code, never a template."""

    cubin: bytes
    spec: KernelSpec | ForwardSpec

    @property
    def nondeterministic(self) -> bool:
        """True when the kernel is not deterministic by construction."""
        return isinstance(self.spec, KernelSpec) and self.spec.determinism == "none"

    @property
    def batch_invariant(self) -> bool:
        """True when the bits are those of a batch-invariant kernel, whose dw is a sum of chunks."""
        return isinstance(self.spec, KernelSpec) and self.spec.run_rows > 0

    @property
    def packs(self) -> bool:
        """True where rows may have gaps between them."""
        return not isinstance(self.spec, KernelSpec) or self.spec.row_period == 1


@dataclass(frozen=True)
class Job:
    """One request.

    kind: "evaluate", "accuracy", "determinism", "recheck" (accuracy and the bits of seeded inputs)
    or "digest" (one candidate, answered with a Result),
    "interleave" (any number, answered with one Block) or "probe" (the floor alone: shows that the
    GPU works). best_us: of the best candidate so far; floor_us: the fastest floor of this problem
    in this run; None without one. rounds: of the Block, None for those of the finals. condition:
    one of rotation.CONDITIONS, "" for the worker's own.
    """

    kind: str
    problem: Problem
    candidates: tuple[Candidate, ...] = ()
    best_us: float | None = None
    floor_us: float | None = None
    rounds: int | None = None
    condition: str = ""

    def probe(self) -> Job:
        """The job that sets up the same problem and times its floor."""
        return Job("probe", self.problem)


@dataclass(frozen=True)
class Answer:
    """The answer to a job. result or block: as the job's kind says; a result in place of a block is
    a failure. condition: of the block, one of rotation.CONDITIONS; where inputs are too small or
    too large to rotate, another one than the job's. error: "" or why the problem cannot be set up.
    last: the process ends after this answer, because its context is lost or short of memory.
    short_of_memory: it may do in a fresh process."""

    result: Result | None = None
    block: Block | None = None
    condition: str = ""
    error: str = ""
    last: bool = False
    short_of_memory: bool = False


class Handler(Protocol):
    """The interface of what does the work inside the worker; `Session` is the real one."""

    facts: dict[str, Any]

    def handle(self, job: Job) -> Answer: ...


class NoGpuError(NormforgeError):
    """PyTorch sees no CUDA GPU at all, which is no fault of anybody."""


class WorkerLostError(Exception):
    """A job was not done, most often because the worker died or was killed at its deadline.
    outcome: that of the candidate; outside: it is no candidate's doing (a signal that nothing on a
    GPU sends ended the worker, or it died without a job)."""

    def __init__(self, outcome: str, note: str, outside: bool = False) -> None:
        super().__init__(note)
        self.outcome, self.note, self.outside = outcome, note, outside
