"""One tuning run: every problem searched, its winner emitted."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from generator.emulate.evaluator import EmulatingPredictor
from generator.evaluate.gpu.evaluator import MeasuredEvaluator
from generator.kernels.compile_pool import CompilePool
from generator.package.emit import check_package
from generator.package.entries import Emission
from generator.problem import Problem
from generator.studies.records import Winner
from generator.studies.storage import database_file, open_storage
from generator.studies.study_log import stored_winners
from generator.studies.work_queue import open_queue
from generator.tuner.device_pool import DevicePool
from generator.tuner.display import Status
from generator.tuner.emission import emit
from generator.tuner.lifecycle import exclusive_run
from generator.tuner.plan import Plan
from generator.tuner.task_list import TaskList
from generator.tuner.task_runner import TaskRunner, compilers_of, run_tasks


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run: winners (None where nothing may win) in the order of the problems,
    failures (why a problem has no answer from this run), the emission, None when there was nothing
    to emit, and unchanged: how many of the winners are those of earlier runs, without a new
    trial."""

    winners: tuple[tuple[Problem, Winner | None], ...]
    emission: Emission | None
    interrupted: bool
    failures: Mapping[Problem, str]
    unchanged: int


def check_problems(plan: Plan, status: Status) -> None:
    """Raise NormforgeError, before anything is searched, for a problem that no config serves."""
    for done, problem in enumerate(plan.searched, 1):
        plan.space_of(problem).sample(problem, plan.target, random.Random(0))
        status.phase("planning", done, len(plan.searched))


def tune(plan: Plan, measurer: MeasuredEvaluator | DevicePool | None, status: Status) -> Outcome:
    """Search every problem of the plan and emit the winners.

    measurer: who measures, None to predict; closed when the search is over. Problems that the
    storage has finished return at once. SIGTERM ends the run after the trial under way and emits
    what was found; Ctrl-C raises KeyboardInterrupt within about a second and leaves the package as
    it was. With a shared storage any number of runs may do the same plan: each problem is searched
    once, and all end with the same winners.
    """
    check_problems(plan, status)
    # A database that does not answer is told before a folder is made.
    database = open_storage(plan.storage) if plan.storage else None
    check_package(plan.package, plan.target)
    interrupted = False
    with (
        exclusive_run(plan.out, plan.shared, database_file(plan.storage)) as stop,
        CompilePool(plan.target.arch, compilers_of(plan)) as pool,
    ):
        storage = database or open_storage(plan.where)
        before = stored_winners(storage)
        plan = plan.on_top_of(before)
        queue = open_queue(plan.storage)
        tasks = TaskList(plan, queue)
        try:
            if isinstance(measurer, DevicePool):
                measurer.search(plan, tasks, stop, status)
            else:
                evaluator = measurer or EmulatingPredictor(plan.target)
                facts = measurer.facts if measurer else {}
                runner = TaskRunner(plan, pool, evaluator, facts, storage)
                run_tasks(runner, tasks, stop, status)
        except KeyboardInterrupt:
            stop.cancel_alarm()
            if stop.at_once:
                raise
            interrupted = True
        finally:
            queue.close()
        winners = [(p, tasks.winners[p]) for p in plan.problems if p in tasks.winners]
        found = [winner for _, winner in winners if winner is not None]
        every = [winner for winner in map(tasks.winners.get, plan.searched) if winner is not None]
        emission = emit(plan, every, storage, pool, status, stop) if found else None
        if stop.at_once:  # it came too late to stop anything
            raise KeyboardInterrupt
    interrupted = interrupted or stop.signal is not None  # it may end while kernels are compiled
    unchanged = sum(winner in before for winner in found)
    return Outcome(tuple(winners), emission, interrupted, tasks.failures, unchanged)
