"""Several GPUs of one machine: who gets which problem, and what a process that dies costs."""

from __future__ import annotations

import os
import signal
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from generator.errors import NormforgeError
from generator.evaluate.gpu.protocol import NoGpuError
from generator.problem import Problem
from generator.result import Result
from generator.shape_lists import load_problems
from generator.studies.records import Record, Winner
from generator.studies.storage import open_storage
from generator.studies.study_log import StudyLog
from generator.studies.work_queue import Queue
from generator.tuner import choose_device, device_pool, device_process
from generator.tuner.choose_device import choose_devices, choose_target
from generator.tuner.lifecycle import Stop
from generator.tuner.plan import Plan, expected_seconds, longest_first
from generator.tuner.task_list import TaskList
from generator.tuner.task_runner import TaskRunner, run_tasks
from tests.support.fake_devices import (
    FACTS,
    PROBLEMS,
    TRIALS,
    DevicePool,
    FakeDevice,
    LoggingEvaluator,
    Quiet,
    lines,
    make_plan,
    open_frail,
)
from tests.support.fake_supervisor import FakeSupervisor
from tests.support.synthetic import LEGAL, FakePool, shrink

pytestmark = pytest.mark.usefixtures("quick_proposals")


def open_fake(folder: Path, delay: float, index: int) -> FakeDevice:
    return FakeDevice(folder, delay)


def open_mixed(folder: Path, index: int) -> FakeDevice:
    device = FakeDevice(folder)
    device.facts = FACTS if index == 0 else {**FACTS, "name": "NVIDIA H100 80GB HBM3"}
    return device


def open_absent(folder: Path, index: int) -> FakeDevice:
    if index == 1:
        raise NormforgeError("the GPU worker cannot start: planted")
    return FakeDevice(folder)


def search(own: device_pool.DevicePool, plan: Plan, stop: Stop | None = None) -> Quiet:
    watcher = Quiet()
    own.search(plan, TaskList(plan, Queue()), stop or Stop(), watcher)
    return watcher


def records(plan: Plan) -> dict[str, list[Record]]:
    storage = open_storage(plan.where)
    return {
        str(problem): [
            Record.from_trial(trial) for trial in StudyLog(storage, plan.study(problem)).trials()
        ]
        for problem in plan.problems
    }


def check_complete(plan: Plan, watcher: Quiet) -> None:
    """Every problem has its trials, none twice, and a winner."""
    assert watcher.winners.keys() == set(plan.problems)
    assert all(watcher.winners.values())
    for problem, done in records(plan).items():
        assert len(done) == TRIALS, problem
        assert len({LEGAL.key(record.config) for record in done}) == TRIALS, problem


def test_four_devices_search_every_problem_once(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, TRIALS, devices=(0, 1, 2, 3))
    with DevicePool(plan.devices, partial(open_fake, tmp_path, 0.002)) as own:
        watcher = search(own, plan)
    check_complete(plan, watcher)
    finals = Counter(words[1] for words in lines(tmp_path) if words[0] == "finals")
    assert finals == {str(problem): 1 for problem in PROBLEMS}
    assert len(list(tmp_path.glob("*.log"))) == 4, "a device had nothing to do"


def test_devices_find_what_one_device_finds(tmp_path: Path) -> None:
    """Nothing depends on who searches what first in a space that is swept whole."""
    space = shrink(tmp_path, LEGAL.first(1)[0], strategy=["column_slices", "separate", "atomic"])
    problems = tuple(Problem.parse(f"{M}x1024:bf16") for M in (2048, 4096, 8192, 16384))
    options = {"problems": problems, "space_file": space.path}
    one = make_plan(tmp_path / "one", 50, **options)
    alone = Quiet()
    runner = TaskRunner(
        one, FakePool(), LoggingEvaluator(tmp_path, 0.0), FACTS, open_storage(one.where)
    )
    run_tasks(runner, TaskList(one, Queue()), Stop(), alone)

    two = make_plan(tmp_path / "two", 50, devices=(0, 1), **options)
    with DevicePool(two.devices, partial(open_fake, tmp_path, 0.0)) as own:
        together = search(own, two)

    def told(winner: Winner | None) -> dict[str, Any]:
        assert winner is not None
        return winner.to_json() | {"date": ""}

    assert {p: told(w) for p, w in alone.winners.items()} == {
        p: told(w) for p, w in together.winners.items()
    }


def test_search_that_has_no_time_for_a_trial_says_so(tmp_path: Path) -> None:
    problem = Problem.parse("1024x1280:bf16")  # it has no incumbent
    plan = make_plan(tmp_path, TRIALS, seconds=1e-4, devices=(0, 1), problems=(problem,))
    with DevicePool(plan.devices, partial(open_fake, tmp_path, 0.0)) as own:
        watcher = search(own, plan)
    assert watcher.winners == {problem: None}
    assert watcher.failures == ["its time was over before the first trial: give more --seconds"]


def test_a_study_that_nothing_may_win_has_no_failure_when_it_is_asked_again(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, 3, problems=PROBLEMS[:1])
    evaluator = SimpleNamespace(
        evidence="measured",
        evaluate=lambda *_: Result("wrong"),
        finals=lambda _, entries: [Result("wrong")] * len(entries),
    )
    for _ in range(2):
        watcher = Quiet()
        storage = open_storage(plan.where)
        runner = TaskRunner(plan, FakePool(), cast(Any, evaluator), FACTS, storage)
        run_tasks(runner, TaskList(plan, Queue()), Stop(), watcher)
        assert (watcher.winners, watcher.failures) == ({PROBLEMS[0]: None}, [])


def test_killed_process_is_replaced_and_its_problem_continued(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, TRIALS, devices=(0, 1), problems=PROBLEMS[:4])
    for problem in PROBLEMS[:2]:
        (tmp_path / f"flag {problem}").write_text("kill")
    with DevicePool(plan.devices, partial(open_frail, tmp_path)) as own:
        watcher = search(own, plan)
    assert not list(tmp_path.glob("flag*")), "nobody was killed"
    check_complete(plan, watcher)
    trials = Counter(tuple(words[1:]) for words in lines(tmp_path) if words[0] == "trial")
    again = sum(trials.values()) - len(trials)
    assert again <= 2, "only the trial under way at a kill may be measured again"


def test_problem_that_kills_every_process_ends_the_run(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, TRIALS, devices=(0, 1), problems=PROBLEMS[:1])
    with (
        DevicePool(plan.devices, partial(open_deadly, tmp_path)) as own,
        pytest.raises(NormforgeError, match=f"{PROBLEMS[0]}, which has happened 3 times"),
    ):
        search(own, plan)


def open_deadly(folder: Path, index: int) -> FakeDevice:
    class Deadly(LoggingEvaluator):
        def evaluate(self, *arguments: Any) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

    device = FakeDevice(folder)
    device.evaluator = lambda target: Deadly(folder, 0.0)  # type: ignore[method-assign]
    return device


def test_the_count_of_lost_processes_ends_a_run_also_when_a_failed_gpu_was_the_third(
    tmp_path: Path,
) -> None:
    plan = make_plan(tmp_path, TRIALS)
    tasks = TaskList(plan, Queue())
    with DevicePool((0, 1), partial(open_fake, tmp_path, 0.0)) as own:
        own._deaths[plan.problems[0]] = 2
        first, second = own._devices
        first.task = tasks.claim()
        own._handle_loss(first, "it failed", None, tasks)
        second.task = tasks.claim()
        with pytest.raises(NormforgeError, match=f"{plan.problems[0]}, which has happened 4 times"):
            own._handle_loss(second, "its process died", plan, tasks)


def test_run_goes_on_without_a_gpu_that_failed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(tmp_path, TRIALS, devices=(0, 1), problems=PROBLEMS[:4])
    (tmp_path / f"flag {PROBLEMS[0]}").write_text("fail")
    with DevicePool(plan.devices, partial(open_frail, tmp_path)) as own:
        watcher = search(own, plan)
    check_complete(plan, watcher)
    assert f"fallen off the bus while it searched {PROBLEMS[0]}" in capfd.readouterr().err


def test_last_gpu_that_fails_ends_the_run(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, TRIALS, problems=PROBLEMS[:1])
    (tmp_path / f"flag {PROBLEMS[0]}").write_text("fail")
    with (
        DevicePool(plan.devices, partial(open_frail, tmp_path)) as own,
        pytest.raises(NormforgeError, match=r"off the bus .*; no other GPU is left to this run"),
    ):
        search(own, plan)


def test_request_to_end_is_obeyed_after_the_trials_under_way(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, 200, devices=(0, 1), problems=PROBLEMS[:4])

    class Impatient(Quiet):
        seen = 0

        def progress(self, index: int, event: Any) -> None:
            self.seen += 1
            if self.seen == 10:
                stop.signal = signal.SIGINT

    stop, watcher = Stop(), Impatient()
    tasks = TaskList(plan, Queue())
    with (
        DevicePool(plan.devices, partial(open_fake, tmp_path, 0.005)) as own,
        pytest.raises(KeyboardInterrupt),
    ):
        own.search(plan, tasks, stop, watcher)
    measured = [words for words in lines(tmp_path) if words[0] == "trial"]
    written = sum(map(len, records(plan).values()))
    assert 10 <= len(measured) == written < 100, "a measured trial was not stored"
    assert watcher.winners == {}


def test_last_words_about_noise_while_another_device_still_searches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is to end loses nothing when one device ends before the other."""
    plan = make_plan(tmp_path, 200, devices=(0, 1), problems=PROBLEMS[:2])

    class Noisy(LoggingEvaluator):
        def disturbances(self) -> str:
            return f"noise after {self.delay} s"

    class Device(FakeDevice):
        def evaluator(self, target: Any) -> Any:
            return Noisy(self.folder, self.delay)

    class Impatient(Quiet):
        said: list[str]

        def progress(self, index: int, event: Any) -> None:
            stop.signal = signal.SIGTERM

        def say(self, line: str) -> None:
            said.append(line)

    said: list[str] = []
    stop = Stop()
    monkeypatch.setattr(device_process, "MeasuredEvaluator", Noisy)
    open_device = lambda index: Device(tmp_path, (0.01, 1.0)[index])  # noqa: E731
    with DevicePool(plan.devices, open_device) as own, pytest.raises(KeyboardInterrupt):
        own.search(plan, TaskList(plan, Queue()), stop, Impatient())
    assert said == ["noise after 0.01 s", "noise after 1.0 s"]


def test_devices_of_two_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        NormforgeError, match=r"device 1 is a NVIDIA H100 80GB HBM3 .* for one model"
    ):
        DevicePool((0, 1), partial(open_mixed, tmp_path))


def test_device_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NormforgeError, match="device 1: the GPU worker cannot start: planted"):
        DevicePool((0, 1), partial(open_absent, tmp_path))


def test_longest_problems_go_first_and_four_devices_end_together() -> None:
    problems = load_problems("default")
    order = longest_first(problems)
    assert sorted(order) == sorted(problems)
    times = [expected_seconds(problem) for problem in order]
    assert times == sorted(times, reverse=True)
    ends = [0.0] * 4
    for seconds in times:
        ends[ends.index(min(ends))] += seconds
    assert max(ends) < 0.27 * sum(times)


def test_one_device_alone_keeps_the_order_of_the_shapes(tmp_path: Path) -> None:
    tasks = TaskList(make_plan(tmp_path, 1), Queue())
    claimed = []
    while task := tasks.claim():
        claimed.append(task.problem)
        tasks.conclude(task, None)
    assert claimed == list(PROBLEMS)


def test_equal_shares_of_the_seconds_count_the_devices(tmp_path: Path) -> None:
    for devices, each in (((0,), 10.0), ((0, 1, 2, 3), 40.0)):
        plan = make_plan(tmp_path, 1, seconds=10.0 * len(PROBLEMS), devices=devices)
        assert plan.budget(PROBLEMS[0]).seconds == each


# The GPU that is here.


@dataclass
class Machine:
    """gpu: the name of its GPUs, "" where it has none; started: the supervisors of those in use."""

    gpu: str = "NVIDIA H200"
    started: list[FakeSupervisor] = field(default_factory=list)

    def open(self, device: int) -> FakeSupervisor:
        if not self.gpu:
            raise NoGpuError("PyTorch sees no CUDA device")
        self.started.append(FakeSupervisor(facts={**FACTS, "name": self.gpu}))
        return self.started[-1]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    monkeypatch.setattr(device_process, "Supervisor", found.open)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return found


@pytest.mark.parametrize("name", ["auto", "h200"])
def test_worker_that_tells_the_name_goes_on_to_measure(machine: Machine, name: str) -> None:
    target, evaluator, sentence = choose_target(name, 3)
    assert (target.name, target.sms) == ("h200", 132)
    assert evaluator is not None
    assert len(machine.started) == 1
    assert sentence == "Measuring on device 3: NVIDIA H200."
    evaluator.close()
    assert machine.started[0].closed


def test_worker_of_another_gpu_is_ended_and_nothing_is_measured(
    machine: Machine,
) -> None:
    target, evaluator, sentence = choose_target("gb200", 0)
    assert (target.name, evaluator) == ("gb200", None)
    assert sentence.startswith("No gb200 here (this machine has a NVIDIA H200): nothing is")
    assert [one.closed for one in machine.started] == [True]


def test_unknown_gpu_is_named_and_its_worker_ended(machine: Machine) -> None:
    machine.gpu = "NVIDIA T1000"
    with pytest.raises(NormforgeError, match=r"found a NVIDIA T1000, which .* does not know"):
        choose_target("auto", 0)
    assert [one.closed for one in machine.started] == [True]


def test_machine_without_a_gpu_predicts_also_for_several_devices(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.gpu = ""
    assert choose_target("gb200", 0)[1] is None
    with pytest.raises(NormforgeError, match="found no CUDA GPU"):
        choose_target("auto", 0)
    monkeypatch.setattr(choose_device, "DevicePool", DevicePool)
    target, measurer, sentence = choose_devices("gb200", (0, 1))
    assert (target.name, measurer) == ("gb200", None)
    assert "this machine has no CUDA GPU" in sentence


def test_device_pool_of_the_gpu_that_is_here_measures(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose_device, "DevicePool", DevicePool)
    target, measurer, sentence = choose_devices("auto", (0, 2))
    assert measurer is not None
    measurer.close()
    assert target.name == "h200"
    assert sentence == "Measuring on devices 0, 2: NVIDIA H200."


@pytest.mark.parametrize("error", [EOFError, ConnectionResetError, BrokenPipeError])
def test_a_process_that_ends_with_messages_unread_is_lost(error: type[Exception]) -> None:
    """Not the run."""

    def recv() -> None:
        raise error

    gone = SimpleNamespace(join=lambda _: None, exitcode=-9)
    device = SimpleNamespace(connection=SimpleNamespace(recv=recv), _process=gone)
    with pytest.raises(device_pool._LostError, match=r"its process died \(exit -9\)"):
        device_pool._DeviceProcess.receive(device)  # type: ignore[arg-type]
