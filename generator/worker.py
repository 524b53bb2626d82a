"""A disposable process that owns one GPU, and jobs for it under deadlines.

The parent never touches CUDA. Whatever a candidate does to the worker (an illegal access, a hang, a
lost context) ends that process and becomes the candidate's outcome; the next job gets a new one.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

from generator.errors import NormforgeError
from generator.noise import Block
from generator.problem import Problem
from generator.processes import end_with_parent, shielded
from generator.result import Result
from generator.runtime.plan import KernelSpec

START_SECONDS = 120.0
_FROM_OUTSIDE = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGINT}
"""Exit codes that no kernel causes: the system, a person or a batch system ended the worker."""


@dataclass(frozen=True)
class Candidate:
    """What the worker needs of a variant: it gets machine code, never a template."""

    cubin: bytes
    spec: KernelSpec


@dataclass(frozen=True)
class Job:
    """One request.

    kind: "evaluate", "ladder" or "digest" (one candidate each, answered with a Result),
    "interleave" (any number of candidates, answered with one Block) or "probe" (the reference
    alone: shows that the GPU works). best_us: of the best candidate so far; floor_us: the fastest
    reference of this problem in this run; None where there is none yet.
    """

    kind: str
    problem: Problem
    candidates: tuple[Candidate, ...] = ()
    best_us: float | None = None
    floor_us: float | None = None


@dataclass(frozen=True)
class Answer:
    """result or block: as the job's kind says; a result in place of a block is a failure.
    error: "" or why the problem cannot be set up. last: the process ends after this answer, because
    its context is lost or short of memory. short_of_memory: it may do in a fresh process."""

    result: Result | None = None
    block: Block | None = None
    error: str = ""
    last: bool = False
    short_of_memory: bool = False


class Hands(Protocol):
    """What does the work inside the worker; generator.session.Session is the real one."""

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


def open_session(device: int) -> Hands:
    """The real session, imported in the worker alone."""
    from generator.session import Session

    return Session(device)


class GpuWorker:
    """A worker process on one device. method: how multiprocessing starts it."""

    def __init__(
        self,
        device: int,
        open_hands: Callable[[int], Hands] = open_session,
        method: str = "spawn",
    ) -> None:
        context: Any = multiprocessing.get_context(method)
        self._connection, child = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(child, device, open_hands), daemon=True
        )
        with shielded():
            self._process.start()
        child.close()
        self._facts: dict[str, Any] | None = None

    def ready(self) -> dict[str, Any]:
        """Waits until the worker has its GPU; facts about the device and the driver.

        Raises NormforgeError when it says that it cannot have one (NoGpuError when there is none)
        and WorkerLostError when it died or hung."""
        if self._facts is None:
            try:
                answer = self._receive(START_SECONDS, "starting")
            except WorkerLostError as lost:
                # It had no job yet, so that no candidate is to blame.
                raise WorkerLostError(lost.outcome, lost.note, outside=True) from None
            if not isinstance(answer, dict):
                self.kill()
                kind, reason = answer
                raise (NoGpuError if kind == NoGpuError.__name__ else NormforgeError)(
                    f"the GPU worker cannot start: {reason}"
                )
            self._facts = answer
        return self._facts

    def call(self, job: Job, seconds: float) -> Answer:
        """The worker's answer. Raises WorkerLostError when there is none by the deadline, and what
        `ready` raises."""
        self.ready()
        try:
            self._connection.send(job)
        except OSError:
            self.kill()  # it died while it had nothing to do
            raise WorkerLostError("crashed", "the GPU worker had died", outside=True) from None
        answer: Answer = self._receive(seconds, job.kind)
        return answer

    def _receive(self, seconds: float, doing: str) -> Any:
        try:
            if not self._connection.poll(seconds):
                self.kill()
                raise WorkerLostError("timeout", f"no answer after {seconds:.0f} s ({doing})")
            return self._connection.recv()
        except (EOFError, OSError):
            self._process.join(5)
            code = self._process.exitcode
            self.kill()
            note = f"the GPU worker died ({doing}, exit {code})"
            raise WorkerLostError("crashed", note, code in _FROM_OUTSIDE) from None

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL; the driver then ends whatever still runs on the GPU."""
        self._process.kill()
        self._process.join(30)
        self._connection.close()


def _serve(connection: Connection, device: int, open_hands: Callable[[int], Hands]) -> None:
    end_with_parent()
    # A batch system sends it to every process of a job; the parent decides what ends when.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        hands = open_hands(device)
        connection.send(hands.facts)
    except Exception as error:
        kind = type(error).__name__
        connection.send((kind, " ".join(str(error).split()) or kind))
        return
    while True:
        try:
            job: Job = connection.recv()
        except (EOFError, OSError):
            return  # the driver is gone, and this process goes as well
        try:
            answer = hands.handle(job)
        except Exception:
            # Nothing a candidate does arrives here; this is the setting-up of a problem.
            answer = Answer(error=traceback.format_exc(limit=3), last=True)
        connection.send(answer)
        if answer.last:
            return
