"""A GPU that answers in the process of the test: a supervisor without workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from generator.evaluate.gpu.protocol import Answer, Job
from generator.result import Result

H200_FACTS = {"name": "NVIDIA H200", "sms": 132, "driver": "1", "cuda_driver": "2", "torch": "3"}


def _refuse(job: Job) -> Answer:
    raise AssertionError(f"nobody expected a job: {job.kind}")


class FakeSupervisor:
    """Stands in for `Supervisor`. `handle` answers the jobs, which are kept in `jobs`."""

    def __init__(
        self,
        handle: Callable[[Job], Answer] = _refuse,
        facts: Mapping[str, Any] = H200_FACTS,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.facts, self.sleep = facts, sleep
        self.device = self.lost = 0
        self.pids = [1]
        self.jobs: list[Job] = []
        self.closed = False
        self._handle = handle

    def call(self, job: Job) -> Answer:
        self.jobs.append(job)
        return self._handle(job)

    def renew(self, problem: object) -> None: ...

    def spare(self, count: int = 1) -> None: ...

    def close(self) -> None:
        self.closed = True


def timing_supervisor(
    times: Callable[[Job], list[float]],
    fault: Callable[[Job], Result | Exception | None] = lambda job: None,
    rounds: int = 3,
) -> FakeSupervisor:
    """Every candidate is accurate, and a block takes `times(job)`, µs, the floor's first, in each
    of its rounds. fault: what becomes of a job instead."""

    def handle(job: Job) -> Answer:
        found = fault(job)
        if isinstance(found, Exception):
            raise found
        if job.kind in ("evaluate", "accuracy"):
            return Answer(found or Result("ok"))
        assert job.kind == "interleave"
        block = [[us] * rounds for us in times(job)]
        return Answer(block=block, condition=job.condition)

    return FakeSupervisor(handle)
