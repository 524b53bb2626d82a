"""The worker of one GPU and its reserve, and what follows when one is lost.

What a candidate does to its worker is the candidate's outcome. What is no candidate's doing (a
worker killed from outside, memory that others hold, a GPU that does not come back) is tried again
for a while, and then ends the problem or the run with a sentence and without a record.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from generator.errors import NormforgeError, ProblemError
from generator.evaluate.gpu.protocol import Answer, Handler, Job, WorkerLostError
from generator.evaluate.gpu.worker import GpuWorker, open_session

JOB_SECONDS = 30.0
"""Deadline of one job; the largest problem's longest check takes a few seconds."""
RETRY_PAUSES = (0.0, 1.0, 5.0, 20.0)
"""Seconds before a job, or the start of a worker, is tried again that failed for a reason outside
of any candidate."""
STARVED = 3
"""Candidates in a row without memory, after which it is the problem that does not fit."""
KEPT = "finished trials are kept, and the same command continues"


def _first(
    start: Callable[[], GpuWorker], sleep: Callable[[float], None]
) -> tuple[GpuWorker, dict[str, Any]]:
    """A started worker and its facts. A refusal is final; a death is tried again."""
    for pause in (0.0, *RETRY_PAUSES):
        sleep(pause)
        worker = start()
        try:
            return worker, worker.ready()
        except WorkerLostError as lost:
            reason = lost.note
    raise NormforgeError(f"the GPU worker cannot start: {reason}")


class Supervisor:
    """One worker at work and one in reserve, which takes over when the first is lost. seconds:
    deadline of one job; open_handler, method: see GpuWorker. facts: about the GPU; lost: how many
    workers were lost."""

    def __init__(
        self,
        device: int,
        seconds: float = JOB_SECONDS,
        *,
        open_handler: Callable[[int], Handler] = open_session,
        method: str = "spawn",
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.device, self.seconds = device, seconds
        self.lost = 0
        self._open = lambda: GpuWorker(device, open_handler, method)
        self.sleep = sleep
        self._roomy = True
        self._starved = 0
        self._reserves: list[GpuWorker] = []
        self._worker, self.facts = _first(self._open, sleep)

    def close(self) -> None:
        for worker in (self._worker, *self._reserves):
            worker.kill()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.pid for worker in (self._worker, *self._reserves)]

    def spare(self, count: int = 1) -> None:
        """Start workers, for which nobody waits, until `count` are in reserve."""
        while len(self._reserves) < count and self._roomy:
            self._reserves.append(self._open())

    def call(self, job: Job) -> Answer:
        """The answer to a job. Raises WorkerLostError when the job killed its worker or cannot be
        finished, ProblemError when something else keeps every worker from it, and NormforgeError
        when no GPU works any more."""
        for pause in (None, *RETRY_PAUSES):
            if pause is not None:
                self.sleep(pause)
            try:
                answer = self._worker.call(job, self.seconds)
            except WorkerLostError as lost:
                self._replace(job.probe())
                if not lost.outside:
                    raise
                answer, reason = Answer(), lost.note
                continue
            if answer.short_of_memory:
                # Two processes of this tuner must not compete for what is left.
                self._roomy = False
                self._replace(None)
                reason = answer.error or (answer.result.note if answer.result else "")
                continue
            self._starved = 0
            if answer.last:
                self._replace(None if answer.error else job.probe())
            return _checked(job, answer)
        self._starved += 1
        if answer.result is not None and self._starved < STARVED:
            return _checked(job, answer)
        raise ProblemError(
            f"{job.problem}: the GPU worker could not do its work {len(RETRY_PAUSES) + 1} times in "
            f"a row ({reason}): see what ends it or holds the GPU's memory; {KEPT}"
        )

    def _replace(self, probe: Job | None) -> None:
        self.lost += 1
        self.renew(probe)

    def renew(self, probe: Job | None) -> None:
        """A reserve, or a new process, becomes the worker. With a probe it has to time the floor
        first: candidate after candidate must not be blamed for a GPU that no longer works."""
        for pause in (0.0, *RETRY_PAUSES):
            self.sleep(pause)
            self._worker.kill()
            self._worker = self._reserves.pop(0) if self._reserves else self._open()
            try:
                self._worker.ready()
                if probe is None:
                    return
                answer = self._worker.call(probe, self.seconds)
                if answer.block is not None:
                    return
                reason = answer.error or (answer.result.note if answer.result else "no answer")
            except (WorkerLostError, NormforgeError) as error:
                reason = str(error)
        self._worker.kill()  # whoever goes on regardless is not given a dying one
        raise NormforgeError(f"the lost GPU worker cannot be replaced: {reason}; {KEPT}")


def _checked(job: Job, answer: Answer) -> Answer:
    if answer.error:
        raise ProblemError(f"{job.problem} cannot be set up on the GPU: {answer.error}")
    if answer.result is not None and job.kind in ("interleave", "probe"):
        raise WorkerLostError(answer.result.outcome, answer.result.note)
    return answer
