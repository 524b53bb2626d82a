"""The list of tasks of a plan: open, under way here, or concluded."""

from __future__ import annotations

import time
from dataclasses import dataclass

from generator.problem import Problem
from generator.studies.leases import Lease
from generator.studies.records import Winner
from generator.studies.work_queue import Queue
from generator.tuner.display import Status
from generator.tuner.plan import Plan, longest_first

_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Task:
    """A problem that this run has claimed. index: its place in the plan; space: the digest of the
    search space that the run began with."""

    index: int
    problem: Problem
    lease: Lease
    space: str


class TaskList:
    """The problems of a plan that are open, under way here, or concluded. Every run concludes every
    problem itself: one that another run has searched is claimed when it is given back, and its
    study answers at once. So all runs have the same winners."""

    def __init__(self, plan: Plan, queue: Queue) -> None:
        self._queue = queue
        alone = plan.parallel_searches == 1 and not plan.shared
        order = plan.searched if alone else longest_first(plan.searched)
        self._spaces = {problem: plan.space_of(problem).digest(problem) for problem in order}
        self._index = {problem: index for index, problem in enumerate(plan.searched)}
        self._problems = {plan.study(problem): problem for problem in order}
        self._open = list(self._problems)  # neither concluded nor under way here
        self._tasks: set[Task] = set()
        self._ask_at = 0.0
        self.winners: dict[Problem, Winner | None] = {}
        self.failures: dict[Problem, str] = {}

    @property
    def done(self) -> bool:
        return not self._open and not self._tasks

    def claim(self) -> Task | None:
        """The next problem, None when there is none or others have them all."""
        if not self._open or time.monotonic() < self._ask_at:
            return None
        lease = self._queue.claim(self._open)
        if lease is None:
            self._ask_at = time.monotonic() + _POLL_SECONDS
            return None
        self._open.remove(lease.study)
        problem = self._problems[lease.study]
        task = Task(self._index[problem], problem, lease, self._spaces[problem])
        self._tasks.add(task)
        return task

    def wait(self) -> dict[Problem, str]:
        """Wait a moment for others. Returns the problems that they have, and who has which."""
        time.sleep(_POLL_SECONDS)
        holders = self._queue.holders(self._open)
        return {self._problems[study]: holder for study, holder in holders.items()}

    def conclude(self, task: Task, winner: Winner | None) -> None:
        self._end(task)
        self.winners[task.problem] = winner

    def fail(self, task: Task, reason: str) -> None:
        """Record that this run has no answer for the problem; another one may find it."""
        self._end(task)
        self.winners[task.problem] = None
        self.failures[task.problem] = reason

    def tell(self, task: Task, status: Status) -> None:
        """Show how a task ended."""
        problem = task.problem
        failure = self.failures.get(problem, "")
        status.winner(task.index, problem, self.winners[problem], failure)

    def give_back(self, task: Task) -> None:
        """The problem is open again: its search ended early, or the lease was lost."""
        self._end(task)
        self._open.insert(0, task.lease.study)

    def _end(self, task: Task) -> None:
        self._tasks.remove(task)
        self._queue.release(task.lease)
