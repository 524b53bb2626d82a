"""Devices without a GPU, and one of several runs on a database: for tuner/test_devices.py and
studies/test_postgres.py."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import sklearn.ensemble  # noqa: F401 - each of the forked processes would import it, for seconds

from generator.errors import NormforgeError
from generator.evaluate.evaluator import Evaluator, Pool
from generator.kernels.nvrtc import Compiled
from generator.kernels.variant import Variant
from generator.problem import Problem
from generator.result import Result
from generator.search.budget import Progress
from generator.space.load import SPACE_FILE
from generator.studies.records import Winner
from generator.studies.storage import open_storage
from generator.studies.work_queue import open_queue
from generator.target import Target
from generator.tuner import device_pool
from generator.tuner.lifecycle import Stop
from generator.tuner.plan import Plan
from generator.tuner.task_list import TaskList
from generator.tuner.task_runner import TaskRunner, run_tasks
from tests.support.synthetic import TARGET, FakeEvaluator, FakePool, digest

FACTS = {"name": "NVIDIA H200", "sms": TARGET.sms, "driver": "1.0"}
PROBLEMS = tuple(
    Problem.parse(f"{M}x{N}:bf16") for M in (1024, 4096, 16384) for N in (1024, 2048, 4096, 8192)
)


class Quiet:
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.winners: dict[Problem, Winner | None] = {}
        self.failures: list[str] = []
        self.waits: list[Mapping[Problem, str]] = []

    def progress(self, index: int, event: Progress) -> None:
        pass

    def winner(
        self, index: int, problem: Problem, winner: Winner | None, failure: str = ""
    ) -> None:
        assert problem not in self.winners, "concluded twice in one run"
        self.winners[problem] = winner
        self.failures += [failure] if failure else []

    def waiting(self, holders: Mapping[Problem, str]) -> None:
        self.waits.append(holders)

    def phase(self, name: str, done: int, total: int) -> None:
        pass

    def say(self, line: str) -> None:
        pass


class LoggingEvaluator(FakeEvaluator):
    """Writes every evaluation and every finals to a file of its process in `folder`."""

    def __init__(self, folder: Path, delay: float) -> None:
        super().__init__(delay=delay)
        self.log = folder / f"{os.getpid()}.log"

    def _write(self, *words: object) -> None:
        with self.log.open("a") as file:
            file.write(" ".join(map(str, words)) + "\n")

    def evaluate(
        self, problem: Problem, variant: Variant, compiled: Compiled, best_us: float | None
    ) -> Result:
        result = super().evaluate(problem, variant, compiled, best_us)
        self._write("trial", problem, digest(sorted(variant.config.items())))
        return result

    def finals(self, problem: Problem, entries: list[tuple[Variant, Compiled]]) -> list[Result]:
        self._write("finals", problem)
        return super().finals(problem, entries)


class FakeDevice:
    """Stands in for `generator.tuner.device_process.Gpu`."""

    facts: Mapping[str, Any] = FACTS

    def __init__(self, folder: Path, delay: float = 0.0) -> None:
        self.folder, self.delay = folder, delay

    def evaluator(self, target: Target) -> Evaluator:
        return LoggingEvaluator(self.folder, self.delay)

    def pool(self, arch: str, processes: int) -> AbstractContextManager[Pool]:
        return nullcontext(FakePool())

    def close(self) -> None:
        pass


def lines(folder: Path) -> list[list[str]]:
    """Return what all processes have logged."""
    return [line.split() for path in folder.glob("*.log") for line in path.open()]


class OfBackwards(Plan):
    """Without forwards, which tests/tuner/test_forward.py is about."""

    @property
    def searched(self) -> tuple[Problem, ...]:
        return self.problems


def make_plan(out: Path, trials: int, kind: type[Plan] = OfBackwards, **options: Any) -> Plan:
    options = {"problems": PROBLEMS, "space_file": SPACE_FILE, "devices": (0,), **options}
    return kind(target=TARGET, out=out, trials=trials, **options)


def search_plan(plan: Plan, lease_seconds: float, delay: float) -> None:
    """Search a plan in one of several runs of it. Leaves its winners in a file of its process."""
    assert plan.storage is not None
    storage, queue = open_storage(plan.storage), open_queue(plan.storage, lease_seconds)
    watcher = Quiet()
    runner = TaskRunner(plan, FakePool(), LoggingEvaluator(plan.out, delay), FACTS, storage)
    run_tasks(runner, TaskList(plan, queue), Stop(), watcher)
    queue.close()
    found = {str(p): w and w.to_json() for p, w in sorted(watcher.winners.items())}
    (plan.out / f"{os.getpid()}.json").write_text(json.dumps(found))


TRIALS = 20
# Forking takes a tenth of the time of fresh processes.
DevicePool = partial(device_pool.DevicePool, method="fork")


class Frail(FakeDevice):
    """The first evaluation of one problem that finds a flag does what is planted, once."""

    def evaluator(self, target: Any) -> Any:
        device = self

        class Evaluator(LoggingEvaluator):
            def evaluate(self, problem: Any, *rest: Any) -> Any:
                flag = device.folder / f"flag {problem}"
                if flag.exists() and len(self.evaluated) >= 5:
                    planted = flag.read_text()
                    flag.unlink()
                    if planted == "kill":
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise NormforgeError("the GPU has fallen off the bus")
                return super().evaluate(problem, *rest)

        return Evaluator(self.folder, self.delay)


def open_frail(folder: Path, index: int) -> Frail:
    return Frail(folder, 0.005)
