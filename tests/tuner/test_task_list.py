"""The problems of a plan: open, under way or concluded."""

from __future__ import annotations

from pathlib import Path

from generator.studies.leases import Lease
from generator.studies.work_queue import Queue
from generator.tuner.task_list import TaskList
from tests.support.fake_devices import PROBLEMS, make_plan
from tests.support.searches import DETERMINISTIC
from tests.support.synthetic import make_winner

WINNER = make_winner(DETERMINISTIC[0])


class Watched(Queue):
    def __init__(self) -> None:
        self.released: list[str] = []

    def release(self, lease: Lease) -> None:
        self.released.append(lease.study)


def tasks(folder: Path, queue: Queue | None = None) -> TaskList:
    return TaskList(make_plan(folder, 3, problems=PROBLEMS[:2]), queue or Queue())


def test_a_problem_that_was_given_back_is_searched_again(tmp_path: Path) -> None:
    own = tasks(tmp_path)
    first = own.claim()
    assert first is not None
    own.give_back(first)
    assert not own.done
    again = own.claim()
    assert again is not None and again.problem == first.problem
    own.conclude(again, WINNER)
    other = own.claim()
    assert other is not None and other.problem != first.problem
    own.conclude(other, None)
    assert own.done
    assert own.winners == {first.problem: WINNER, other.problem: None}


def test_a_problem_that_failed_has_no_winner_and_a_reason(tmp_path: Path) -> None:
    own = tasks(tmp_path)
    task = own.claim()
    assert task is not None
    own.fail(task, "no memory")
    assert (own.winners, own.failures) == ({task.problem: None}, {task.problem: "no memory"})


def test_a_concluded_problem_is_given_back_to_the_queue(tmp_path: Path) -> None:
    """Others then conclude it themselves."""
    queue = Watched()
    own = tasks(tmp_path, queue)
    for end in (lambda t: own.conclude(t, None), lambda t: own.fail(t, "planted")):
        task = own.claim()
        assert task is not None
        end(task)
        assert queue.released[-1] == task.lease.study
    assert len(queue.released) == 2
