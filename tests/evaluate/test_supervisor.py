"""Workers of the GPU and who looks after them, with processes that stand in for a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from generator.evaluate.gpu.protocol import Answer, Job, WorkerLostError
from generator.evaluate.gpu.supervisor import Supervisor
from generator.problem import Problem
from generator.result import Result

PROBLEM = Problem.parse("4096x1024:bf16")


@dataclass(frozen=True)
class Gpu:
    """Opens a session whose jobs of one kind fail."""

    fails: str = ""

    def __call__(self, device: int) -> Session:
        return Session(self.fails)


class Session:
    def __init__(self, fails: str) -> None:
        self.fails, self.facts = fails, dict[str, Any](name="fake")

    def handle(self, job: Job) -> Answer:
        if job.kind == self.fails:
            return Answer(Result("crashed", note="an illegal access"))
        if job.kind in ("interleave", "probe"):
            return Answer(block=[[1.0]])
        return Answer(Result("ok"))


@contextmanager
def supervised(fails: str = "") -> Iterator[Supervisor]:
    found = Supervisor(0, 20.0, open_handler=Gpu(fails), method="fork", sleep=lambda _: None)
    try:
        yield found
    finally:
        found.close()


@pytest.mark.parametrize("kind", ["interleave", "probe"])
def test_a_result_in_place_of_a_block_is_a_lost_worker(kind: str) -> None:
    with supervised(kind) as supervisor:
        with pytest.raises(WorkerLostError, match="an illegal access") as lost:
            supervisor.call(Job(kind, PROBLEM))
        assert lost.value.outcome == "crashed" and not lost.value.outside
        assert supervisor.call(Job("evaluate", PROBLEM)).result == Result("ok")


def test_the_result_of_a_candidate_is_an_answer() -> None:
    with supervised("evaluate") as supervisor:
        answer = supervisor.call(Job("evaluate", PROBLEM))
        assert answer.result is not None and answer.result.outcome == "crashed"
        assert supervisor.call(Job("probe", PROBLEM)).block == [[1.0]]


def test_no_worker_outlives_its_supervisor() -> None:
    with supervised() as supervisor:
        supervisor.spare(2)
        pids = supervisor.pids
        assert len({*pids}) == 3
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
