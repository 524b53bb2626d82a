"""One GPU's part in a run: the search of whole problems, one after the other."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from typing import Any

import torch
from optuna.storages import BaseStorage

from generator.errors import NormforgeError, ProblemError
from generator.evaluate.evaluator import Evaluator, Pool
from generator.kernels.nvrtc import nvrtc_version
from generator.package.known_winners import known_forwards, known_winners
from generator.paths import GENERATED
from generator.search.budget import Progress
from generator.search.search import search_problem
from generator.space.legal_configs import LegalConfigs
from generator.studies.leases import LeaseLostError
from generator.studies.postgres import SharedStorage
from generator.studies.records import Winner
from generator.studies.study_log import StudyLog
from generator.tuner.display import Status
from generator.tuner.lifecycle import Stop
from generator.tuner.plan import Plan
from generator.tuner.task_list import Task, TaskList
from normforge.table import TABLE

MAX_COMPILERS = 15
"""Compiler processes of one GPU. What it measures in a second costs six cores to compile, and a
proposal with more than this many before it knows too little of what was measured."""


def compiler_processes(searches: int = 1) -> int:
    """Compiler processes for each of so many searches at the same time: each search keeps a core
    for itself where there are several."""
    cores = len(os.sched_getaffinity(0))
    share = max(1, cores // searches)
    return share if cores <= 2 else max(1, share - 1)


def compilers_of(plan: Plan) -> int:
    """Compiler processes of each of the plan's searches."""
    processes = compiler_processes(plan.parallel_searches)
    return processes if plan.evidence == "predicted" else min(processes, MAX_COMPILERS)


class TaskRunner:
    """Searches problems of a plan with one evaluator. facts: of the GPU that measures, empty where
    none does."""

    def __init__(
        self,
        plan: Plan,
        pool: Pool,
        evaluator: Evaluator,
        facts: Mapping[str, Any],
        storage: BaseStorage,
    ) -> None:
        self.plan, self.pool, self.evaluator, self.storage = plan, pool, evaluator, storage
        # Take those of every operation: a winner of one is a good start for another.
        others = sorted(table.parent for table in GENERATED.glob(f"*/*/{TABLE}"))
        self.known_winners = [
            winner for package in (*others, plan.package) for winner in known_winners(package)
        ]
        self.known_winners += known_forwards(plan.package)
        self.machine = {
            "gpu": facts.get("name", f"{plan.target.name} (absent)"),
            "driver": facts.get("driver"),
            "nvrtc": nvrtc_version(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        }

    def search(self, task: Task, on_progress: Callable[[Progress], None]) -> Winner | None:
        """The winner of a claimed problem. Raises LeaseLostError when the claim is void by now,
        ProblemError when there was no time for a trial, and what `search_problem` raises."""
        plan, space = self.plan, self.plan.space_of(task.problem)
        if space.digest(task.problem) != task.space:
            raise NormforgeError(f"{space.path} was changed meanwhile: start the run again")
        if isinstance(self.storage, SharedStorage):
            self.storage.lease = task.lease
        try:
            winner = search_problem(
                LegalConfigs(space, task.problem, plan.target),
                self.pool,
                self.evaluator,
                self.storage,
                plan.budget(task.problem),
                seed=plan.seed,
                known_winners=self.known_winners,
                machine=self.machine,
                on_progress=on_progress,
            )
        finally:
            if isinstance(self.storage, SharedStorage):
                self.storage.lease = None
        if winner is None and not StudyLog(self.storage, task.lease.study).trials():
            raise ProblemError("its time was over before the first trial: give more --seconds")
        return winner


def run_tasks(runner: TaskRunner, tasks: TaskList, stop: Stop, status: Status) -> None:
    """Search what is open until everything is concluded. Raises KeyboardInterrupt when it is to
    end early."""
    while not tasks.done:
        stop.check()
        task = tasks.claim()
        if task is None:
            status.waiting(tasks.wait())
            continue

        def tell(event: Progress, index: int = task.index) -> None:
            status.progress(index, event)
            stop.check()

        try:
            winner = runner.search(task, tell)
        except LeaseLostError:
            tasks.give_back(task)
            continue
        except ProblemError as error:
            tasks.fail(task, str(error))
        else:
            tasks.conclude(task, winner)
        tasks.tell(task, status)
