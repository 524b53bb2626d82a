"""`--trials +N`: trials on top of those of the last finals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from generator.cli import tune as cli_tune
from generator.cli.main import make_parser
from generator.space.load import SPACE_FILE
from generator.studies.storage import open_storage
from generator.studies.study_log import StudyLog, stored_winners
from generator.studies.work_queue import Queue
from generator.tuner.lifecycle import Stop
from generator.tuner.plan import Plan
from generator.tuner.task_list import TaskList
from generator.tuner.task_runner import TaskRunner, run_tasks
from tests.support.fake_devices import FACTS, PROBLEMS, LoggingEvaluator, Quiet, make_plan
from tests.support.synthetic import FakePool


def search(plan: Plan) -> dict[str, int]:
    """Search the plan as a run does; returns how many trials each problem then has."""
    storage = open_storage(plan.where)
    plan = plan.on_top_of(stored_winners(storage))
    runner = TaskRunner(plan, FakePool(), LoggingEvaluator(plan.out, 0.0), FACTS, storage)
    run_tasks(runner, TaskList(plan, Queue()), Stop(), Quiet())
    return {str(p): len(StudyLog(storage, plan.study(p)).trials()) for p in plan.problems}


def test_further_trials_come_on_top_of_those_of_the_last_finals(tmp_path: Path) -> None:
    first, second = PROBLEMS[:2]
    assert search(make_plan(tmp_path, 6, problems=(first,))) == {str(first): 6}
    more = make_plan(tmp_path, 4, problems=(first, second), further=True)
    assert search(more) == {str(first): 10, str(second): 4}
    assert search(more) == {str(first): 14, str(second): 8}
    absolute = make_plan(tmp_path, 4, problems=(first, second))
    assert search(absolute) == {str(first): 14, str(second): 8}
    winner = stored_winners(open_storage(more.where))[0]
    older = replace(winner, study=f"{winner.study}:2f0c81de")  # as earlier versions called it
    assert more.on_top_of([older]).budget(winner.problem).trials == winner.trials + 4


def test_trials_without_finals_are_no_base(tmp_path: Path) -> None:
    """The next run is asked for as many in all, whatever a killed one had tried."""

    class Killed(LoggingEvaluator):
        def finals(self, *arguments: object) -> object:
            raise KeyboardInterrupt

    plan = make_plan(tmp_path, 5, problems=PROBLEMS[:1], further=True)
    runner = TaskRunner(plan, FakePool(), Killed(tmp_path, 0.0), FACTS, open_storage(plan.where))
    with pytest.raises(KeyboardInterrupt):
        run_tasks(runner, TaskList(plan, Queue()), Stop(), Quiet())
    assert search(plan) == {str(PROBLEMS[0]): 5}


@pytest.mark.parametrize(("text", "trials", "further"), [("40", 40, False), ("+40", 40, True)])
def test_a_sign_says_that_they_come_on_top(text: str, trials: int, further: bool) -> None:
    args = make_parser().parse(["--gpu", "gb200", "--trials", text])
    args.space = SPACE_FILE
    plan = cli_tune._plan(args, PROBLEMS, make_plan(Path(), 1).target, measured=True)
    assert (plan.trials, plan.further) == (trials, further)
