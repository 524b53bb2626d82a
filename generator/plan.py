"""What one tuning run is to do, and how far it is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from generator.budget import Budget
from generator.leases import Lease
from generator.problem import Problem
from generator.queue import Queue
from generator.space import Space
from generator.space_file import load_space
from generator.store import JOURNAL_NAME, is_shared, study_name
from generator.target import Target
from generator.winner import Winner

GENERATED = Path(__file__).resolve().parents[1] / "generated"
"""Where the output folder of each GPU is, by its name, unless the caller says otherwise."""
TRIALS = {"measured": 400, "predicted": 64}
"""Trials of one problem unless the caller says otherwise."""
FINALISTS = 8
# Least squares over the 52 studies of generated/h200 (400 trials each, 7.6 s to 64 s).
_SECONDS_PER_PROBLEM = 7.5
_SECONDS_PER_GIGABYTE = 8.4
_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Plan:
    """What to do. trials: of each problem; seconds: of search in the whole run, in equal shares for
    the problems, None for no limit; storage: a database URL or None for the journal in `out`;
    devices: indices of the GPUs of this machine that measure, none to predict."""

    target: Target
    problems: tuple[Problem, ...]
    space_file: Path
    out: Path
    trials: int
    seconds: float | None = None
    storage: str | None = None
    seed: int = 0
    devices: tuple[int, ...] = ()

    @property
    def evidence(self) -> str:
        """`measured` or `predicted`."""
        return "measured" if self.devices else "predicted"

    @property
    def lanes(self) -> int:
        """Searches at the same time in this run, on this machine."""
        return max(1, len(self.devices))

    @property
    def space(self) -> Space:
        """Read from its file in every process: a space holds compiled rules."""
        return _load_once(self.space_file)

    @property
    def where(self) -> str | Path:
        """Where the studies are: what `generator.store.open_storage` takes."""
        return self.storage or self.out / JOURNAL_NAME

    @property
    def shared(self) -> bool:
        """Whether other runs may search the same problems at the same time."""
        return is_shared(self.storage)

    @property
    def budget(self) -> Budget:
        """Of one problem."""
        seconds = self.seconds and self.seconds * self.lanes / len(self.problems)
        return Budget(self.trials, seconds, FINALISTS)

    def study(self, problem: Problem) -> str:
        """The name of the study of a problem."""
        return study_name(problem, self.target, self.evidence, self.space)


@cache
def _load_once(path: Path) -> Space:
    return load_space(path)


def longest_first(problems: Sequence[Problem]) -> list[Problem]:
    """The order in which several GPUs take problems, so that they end at about the same time."""
    return sorted(problems, key=expected_seconds, reverse=True)


def expected_seconds(problem: Problem) -> float:
    """Seconds of 400 trials on an H200. Only the ratios of problems count, and other GPUs have
    much the same ones."""
    return _SECONDS_PER_PROBLEM + _SECONDS_PER_GIGABYTE * problem.traffic_bytes / 1e9


@dataclass(frozen=True)
class Task:
    """A problem that this run has claimed. index: its place in the plan."""

    index: int
    problem: Problem
    lease: Lease


class Ledger:
    """What of a plan is open, under way here, and concluded.

    Every run concludes every problem itself, also those that others have searched: it claims them
    when they are given back, and their studies answer at once. So all runs have the same winners.
    """

    def __init__(self, plan: Plan, queue: Queue) -> None:
        self._queue = queue
        alone = plan.lanes == 1 and not plan.shared
        order = plan.problems if alone else longest_first(plan.problems)
        self._index = {problem: index for index, problem in enumerate(plan.problems)}
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
        task = Task(self._index[problem], problem, lease)
        self._tasks.add(task)
        return task

    def wait(self) -> dict[Problem, str]:
        """Wait a moment for others; the problems that they have, and who has which."""
        time.sleep(_POLL_SECONDS)
        holders = self._queue.holders(self._open)
        return {self._problems[study]: holder for study, holder in holders.items()}

    def conclude(self, task: Task, winner: Winner | None) -> None:
        self._end(task)
        self.winners[task.problem] = winner

    def fail(self, task: Task, reason: str) -> None:
        """This run has no answer for the problem; another one may find it."""
        self._end(task)
        self.winners[task.problem] = None
        self.failures[task.problem] = reason

    def give_back(self, task: Task) -> None:
        """The problem is open again: its search ended early, or the lease was lost."""
        self._end(task)
        self._open.insert(0, task.lease.study)

    def _end(self, task: Task) -> None:
        self._tasks.remove(task)
        self._queue.release(task.lease)
