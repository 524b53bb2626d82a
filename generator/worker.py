"""A disposable process that owns one GPU, and the evaluator that talks to it under deadlines.

The parent never touches CUDA. Whatever a candidate does to the worker (an illegal access, a hang, a
lost context) ends that process and becomes the candidate's outcome; the next job gets a new one.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from generator.compile import Compiled
from generator.errors import NormforgeError
from generator.problem import Problem
from generator.processes import end_with_parent
from generator.result import Result
from generator.runtime.plan import KernelSpec
from generator.target import Target
from generator.variant import Variant

START_SECONDS = 120.0
JOB_SECONDS = 30.0
"""Deadline of one job; the largest problem's longest check takes a few seconds."""


@dataclass(frozen=True)
class Candidate:
    """What the worker needs of a variant: it gets machine code, never a template."""

    cubin: bytes
    spec: KernelSpec


@dataclass(frozen=True)
class Job:
    """One request. kind: "evaluate", "ladder", "digest" (one candidate each), or "interleave"."""

    kind: str
    problem: Problem
    candidates: tuple[Candidate, ...]
    best_us: float | None = None


class WorkerLostError(Exception):
    """The worker died or was killed at its deadline. `outcome` is "crashed" or "timeout"."""

    def __init__(self, outcome: str, note: str) -> None:
        super().__init__(note)
        self.outcome, self.note = outcome, note


class GpuWorker:
    """A worker process on one device."""

    def __init__(self, device: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(child, device), daemon=True)
        self._process.start()
        child.close()
        self._ready: dict[str, Any] | None = None

    def ready(self) -> dict[str, Any]:
        """Waits until the worker has its GPU; facts about the device and the driver.

        Raises NormforgeError when it cannot have one."""
        if self._ready is None:
            try:
                answer = self._receive(START_SECONDS, "starting")
            except WorkerLostError as lost:
                answer = lost.note
            if isinstance(answer, str):
                self.kill()
                raise NormforgeError(f"the GPU worker cannot start: {answer}")
            self._ready = answer
        return self._ready

    def call(self, job: Job, seconds: float) -> Any:
        """The worker's answer. Raises WorkerLostError when there is none by the deadline."""
        self.ready()
        try:
            self._connection.send(job)
        except (BrokenPipeError, OSError) as error:
            self.kill()
            raise WorkerLostError("crashed", "the GPU worker had died") from error
        return self._receive(seconds, job.kind)

    def _receive(self, seconds: float, doing: str) -> Any:
        try:
            if not self._connection.poll(seconds):
                self.kill()
                raise WorkerLostError("timeout", f"no answer after {seconds:.0f} s ({doing})")
            return self._connection.recv()
        except (EOFError, ConnectionResetError) as error:
            self._process.join(5)
            code = self._process.exitcode
            self.kill()
            raise WorkerLostError(
                "crashed", f"the GPU worker died ({doing}, exit {code})"
            ) from error

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        """SIGKILL; the driver then ends whatever still runs on the GPU."""
        self._process.kill()
        self._process.join(30)
        self._connection.close()


class MeasuredEvaluator:
    """Evaluates candidates on a real GPU; the search sees only Results.

    A second worker is kept in reserve: it takes over when the first is lost, and it is the fresh
    process in which finalists must produce the same bits again. seconds: deadline of one job.
    """

    evidence = "measured"

    def __init__(self, target: Target, device: int = 0, seconds: float = JOB_SECONDS) -> None:
        self.target, self.device, self.seconds = target, device, seconds
        self._worker = GpuWorker(device)
        self.facts = self._worker.ready()
        self._reserve: GpuWorker | None = GpuWorker(device)
        self.lost = 0

    def close(self) -> None:
        self._worker.kill()
        if self._reserve is not None:
            self._reserve.kill()

    def __enter__(self) -> MeasuredEvaluator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _promote(self) -> None:
        """The reserve becomes the worker; the old one goes."""
        self._worker.kill()
        self._worker = self._reserve or GpuWorker(self.device)
        self._reserve = None

    def _candidate(self, variant: Variant, compiled: Compiled) -> Candidate:
        return Candidate(compiled.cubin, variant.spec(self.target.sms))

    def _result(self, job: Job) -> Result:
        """The worker's Result for a job on one candidate, or the Result that its loss is."""
        try:
            answer, fatal = self._worker.call(job, self.seconds)
        except WorkerLostError as lost:
            self.lost += 1
            self._promote()
            return Result(lost.outcome, note=lost.note)
        if fatal:
            self.lost += 1
            self._promote()
        if isinstance(answer, str):
            raise NormforgeError(f"{job.problem} cannot be set up on the GPU: {answer}")
        return Result.from_json(answer)

    def evaluate(
        self, problem: Problem, variant: Variant, compiled: Compiled, best_us: float | None
    ) -> Result:
        """Accuracy, timing, 20-run determinism. Never raises for a bad candidate."""
        job = Job("evaluate", problem, (self._candidate(variant, compiled),), best_us)
        return self._result(job)

    def finals(self, problem: Problem, entries: Sequence[tuple[Variant, Compiled]]) -> list[Result]:
        """The determinism ladder for each, then all that passed timed in the same blocks."""
        if self._reserve is None:
            self._reserve = GpuWorker(self.device)
        candidates = [self._candidate(*entry) for entry in entries]
        results: list[Result] = []
        for candidate in candidates:
            result = self._result(Job("ladder", problem, (candidate,)))
            if result.outcome == "ok":
                result = self._in_fresh_process(problem, candidate, result)
            results.append(result)
        self._promote()
        timed = [i for i, result in enumerate(results) if result.extra.get("digest")]
        times = self._interleave(problem, [candidates[i] for i in timed])
        self._reserve = GpuWorker(self.device)  # starts while the next problem is searched
        for i, (us, floor_us, ratio) in zip(timed, times, strict=True):
            results[i] = replace(results[i], us=us, floor_us=floor_us, ratio=ratio)
        return results

    def _in_fresh_process(self, problem: Problem, candidate: Candidate, first: Result) -> Result:
        if self._reserve is None:
            self._reserve = GpuWorker(self.device)
        try:
            again, fatal = self._reserve.call(Job("digest", problem, (candidate,)), self.seconds)
        except WorkerLostError as lost:
            self._reserve = None
            return Result(lost.outcome, note=lost.note)
        if fatal:
            self._reserve.kill()
            self._reserve = None
        if isinstance(again, str):
            raise NormforgeError(f"{problem} cannot be set up on the GPU: {again}")
        result = Result.from_json(again)
        if result.outcome != "ok":
            return result
        if result.extra["digest"] != first.extra["digest"]:
            note = "other bits in a fresh process"
            return replace(first, outcome="nondeterministic", determinism="refuted", note=note)
        return replace(first, checks=(*first.checks, "fresh process"))

    def _interleave(
        self, problem: Problem, candidates: Sequence[Candidate]
    ) -> list[tuple[float, float, float]]:
        if not candidates:
            return []
        try:
            job = Job("interleave", problem, tuple(candidates))
            answer, fatal = self._worker.call(job, self.seconds)
        except WorkerLostError as lost:
            self._promote()
            raise NormforgeError(f"{problem}: timing the finalists failed: {lost.note}") from lost
        if fatal or isinstance(answer, str):
            self._promote()
            raise NormforgeError(f"{problem}: timing the finalists failed: {answer}")
        return [tuple(row) for row in answer]


# ---- Inside the worker ------------------------------------------------------------------------


def _serve(connection: Connection, device: int) -> None:
    end_with_parent()
    try:
        from generator.session import Session

        session = Session(device)
        connection.send(session.facts)
    except Exception as error:
        connection.send(" ".join(str(error).split()) or type(error).__name__)
        return
    while True:
        try:
            job: Job = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            answer, fatal = session.handle(job)
        except Exception:
            # Nothing a candidate does arrives here; this is the setting-up of a problem.
            answer, fatal = traceback.format_exc(limit=3), True
        connection.send((answer, fatal))
        if fatal:
            return
