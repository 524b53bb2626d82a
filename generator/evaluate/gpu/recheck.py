"""Stored kernels on the GPU of this machine: whether they compute what they did, and how fast."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from statistics import median

from generator.evaluate.gpu.noise import Block, blocks_for, collect
from generator.evaluate.gpu.nvml import DeviceMonitor
from generator.evaluate.gpu.protocol import Candidate, Job, WorkerLostError
from generator.evaluate.gpu.supervisor import Supervisor
from generator.operations import operation_of
from generator.problem import Problem
from generator.result import Result

PAUSES = (0.0, 0.1, 0.5, 1.0, 2.0)
"""Seconds after each noisy block. What stays noisy is said, and no fault of a kernel."""
PAUSES_IN_ALL = 15.0
"""Seconds of all pauses: on a GPU that others use all the time, they would be most of what a check
takes."""


class Rechecker:
    """Runs kernels in the worker of a supervisor. monitor: knows what may disturb the times."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor, self._pauses = supervisor, PAUSES_IN_ALL
        self.monitor = DeviceMonitor(supervisor.facts.get("bus_id"))

    def check(self, problem: Problem, candidate: Candidate, condition: str) -> Result:
        """Check a kernel: accuracy against float64, the bits of seeded inputs (`extra["bits"]`),
        and the time under a condition beside the floor, which says if it is noisy. A kernel that is
        wrong, or that its worker did not survive, is a Result without times. Raises ProblemError
        where the problem cannot be set up, NormforgeError when no GPU works any more."""
        job = Job("recheck", problem, (candidate,))
        floor_us = self._set_up(job.probe())
        try:
            result = self._supervisor.call(job).result
            assert result is not None
            if result.outcome != "ok":
                return result
        except WorkerLostError as lost:
            return Result(lost.outcome, note=lost.note)
        try:
            timed = replace(job, kind="interleave", condition=condition)
            blocks = blocks_for(floor_us)
            timing = collect(lambda: self._block(timed), blocks, None, PAUSES, self._sleep)
        except WorkerLostError as lost:
            if lost.outcome == "launch_error":  # most often, there is no room for so many inputs
                return replace(result, extra=result.extra | {"untimed": lost.note})
            return Result(lost.outcome, note=lost.note)
        fields = timing.fields(operation_of(problem).traffic_bytes(problem))
        fields["extra"] = result.extra | fields["extra"]
        return replace(result, **fields)

    def causes(self) -> str:
        """Return what disturbs times right now, in words; "" when nothing known does."""
        return "; ".join(self.monitor.causes(self._supervisor.pids))

    def _set_up(self, probe: Job) -> float | None:
        """Set up the problem first, so that no kernel is charged with the time that this takes.
        Returns the floor's time in microseconds."""
        with suppress(WorkerLostError):  # replaced, and the new one has done it
            if block := self._supervisor.call(probe).block:
                return median(block[0])
        return None

    def _sleep(self, seconds: float) -> None:
        seconds = min(seconds, self._pauses)
        self._pauses -= seconds
        self._supervisor.sleep(seconds)

    def _block(self, job: Job) -> Block:
        block = self._supervisor.call(job).block
        assert block is not None
        return block
