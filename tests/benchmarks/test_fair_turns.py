"""The harness on a clock of its own: everybody's time is the same statistic of the same rounds, and
no order favours anyone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, permutations
from typing import Any

import pytest
import torch

from benchmarks import harness
from benchmarks.gpu import BLOCKS, ROUNDS, paired_ratio
from benchmarks.harness import Contender, Entrant, ShapeRun, event_time, host_time
from generator.evaluate.gpu import rotation
from generator.evaluate.gpu.rotation import FLUSH, ROTATION, Operation
from generator.evaluate.gpu.timer import Timer
from generator.operations.rmsnorm_backward import Inputs, make_inputs
from generator.problem import Problem
from normforge.serve.reference import reference_backward
from tests.support.fake_clock import FakeClock
from tests.support.operators import Operators

CPU = torch.device("cpu")
PROBLEM = Problem.parse("16x64:bf16")
SERIES = (1.0, 9.0, 2.0, 100.0, 4.0)
"""Microseconds that each takes beyond its own: median 4, least 1, most 100, mean 23.2."""
OWN = {"floor": 5.0, "ours": 10.0, "first": 20.0, "second": 30.0, "in_place": 40.0}
CONTENDERS = ("ours", "first", "second", "in_place")


class Machine:
    """Operations that take their own microseconds and, from call to call, those of SERIES."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.inputs: dict[str, list[Inputs]] = {name: [] for name in OWN}
        self.calls: Counter[str] = Counter()

    def timed(self, name: str) -> None:
        def work() -> None:
            self.clock.log.append(name)
            self.clock.now += OWN[name] + SERIES[self.calls[name] % len(SERIES)]
            self.calls[name] += 1

        self.clock.do(work)

    def contender(self, name: str) -> Contender:
        def bind(inputs: Inputs) -> Callable[[], Any]:
            self.inputs[name].append(inputs)
            made = reference_backward(inputs.dy, inputs.x, inputs.rstd, inputs.weight)
            return lambda: (self.timed(name), made)[1]

        return Contender(bind, overwrites_dy=name == "in_place")

    def floor(self, *_: object) -> Callable[[], None]:
        return lambda: self.timed("floor")


class Noting(Timer):
    """Keeps what ran in each block, and which operators of PyTorch ran in any."""

    def __init__(self, clock: FakeClock, condition: str) -> None:
        super().__init__(CPU, condition=condition)
        self.clock = clock
        self.blocks: list[tuple[int, list[str]]] = []
        self.operators: list[str] = []

    def block(self, operations: Sequence[Operation], rounds: int) -> list[list[float]]:
        start = len(self.clock.log)
        with Operators() as seen:
            times = super().block(operations, rounds)
        self.operators += seen.ran
        self.blocks.append((len(operations), self.clock.log[start:]))
        return times


@pytest.fixture(params=[FLUSH, ROTATION])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A finished run; its `timer`, and the `machine` on which it ran."""
    clock = FakeClock(monkeypatch)
    for name in ("SETS_BYTES", "L2_TIMES"):  # the shape is so small that there would be thousands
        monkeypatch.setattr(rotation, name, 0)
    monkeypatch.setattr(harness.time, "perf_counter_ns", lambda: 1e3 * clock.now)
    machine, timer = Machine(clock), Noting(clock, request.param)
    run: Any = ShapeRun(PROBLEM, {name: machine.contender(name) for name in CONTENDERS}, timer)
    run.operation = replace(run.operation, floor=machine.floor)
    run.machine, run.floor_us = machine, run.run()
    assert not [cell.reason for cell in run.cells.values() if cell.reason]
    return run


def test_everybody_has_the_median_of_all_rounds(run: Any) -> None:
    assert run.floor_us == pytest.approx(9.0)
    assert {name: cell.us for name, cell in run.cells.items()} == {
        name: pytest.approx(OWN[name] + 4.0) for name in CONTENDERS
    }


def test_host_times_are_of_everybodys_own_calls(run: Any) -> None:
    """They are means of 20 calls, in which SERIES comes four times."""
    assert {name: cell.host_us for name, cell in run.cells.items()} == {
        name: pytest.approx(OWN[name] + 23.2) for name in CONTENDERS
    }


def test_nothing_is_copied_in_a_block(run: Any) -> None:
    """A dy that is written over is filled again before."""
    assert run.timer.operators == []


def test_bits_are_compared_on_inputs_whose_sums_cancel(run: Any) -> None:
    ordinary = run.machine.inputs["ours"][0]
    wanted = run.operation.make_cancelling(PROBLEM, ordinary)
    assert not torch.equal(wanted.dy, ordinary.dy)
    for name in CONTENDERS:
        last = run.machine.inputs[name][-1]
        assert torch.equal(last.x, wanted.x) and torch.equal(last.dy, wanted.dy)


def test_events_have_a_cold_l2_and_nothing_but_the_call_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeClock(monkeypatch)
    entrant = Entrant(Machine(clock).contender("in_place"), make_inputs(PROBLEM, CPU))
    monkeypatch.setattr(entrant, "restore", clock.operation("restore", 50.0))
    assert event_time(entrant, Timer(CPU)) == pytest.approx(OWN["in_place"] + 4.0)
    assert clock.log == ["restore", "flush", "in_place"] * (BLOCKS * ROUNDS)


def test_a_host_time_begins_with_an_idle_gpu_and_without_first_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeClock(monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", clock.operation("wait", 500.0))
    monkeypatch.setattr(harness.time, "perf_counter_ns", lambda: 1e3 * clock.now)
    assert host_time(clock.operation("call", 7.0)) == pytest.approx(7.0)
    batches = ["wait", *["call"] * harness.HOST_CALLS] * harness.HOST_REPEATS
    assert clock.log == [*["call"] * 3, *batches, "wait"]


def test_all_take_turns_in_the_same_blocks(run: Any) -> None:
    """Each runs as often as each other, in each place, and behind each other."""
    together = [log for count, log in run.timer.blocks if count == len(OWN)]
    assert len(together) == BLOCKS
    orders = []
    for log in together:
        ran = [name for name in log if name != "flush"][-ROUNDS * len(OWN) :]
        assert Counter(ran) == dict.fromkeys(OWN, ROUNDS)
        followed = Counter(pairwise(ran))
        often = [followed[pair] for pair in permutations(OWN, 2)]
        assert max(often) - min(often) <= 3 and sum(often) == len(ran) - 1
        orders.append(ran)
    assert orders[0] != orders[1] != orders[2], "each block has another order"


def test_what_comes_before_is_the_same_for_all(run: Any) -> None:
    *_, log = (log for count, log in run.timer.blocks if count == len(OWN))
    first = log[-2 * ROUNDS * len(OWN) :]
    if run.timer.condition == FLUSH:
        assert first[0::2] == ["flush"] * (ROUNDS * len(OWN)) and "flush" not in first[1::2]
    else:
        assert "flush" not in log


def test_each_has_inputs_of_its_own_for_each_set(run: Any) -> None:
    """All the same ones, but for one that writes over dy."""
    inputs = {name: run.machine.inputs[name] for name in CONTENDERS}
    # One more for the inputs whose sums cancel, on which bits are compared.
    assert {name: len(own) for name, own in inputs.items()} == dict.fromkeys(
        CONTENDERS, run.sets + 1
    )
    assert run.sets == run.timer.sets(run.operation.traffic_bytes(PROBLEM))
    for name in ("first", "second"):
        assert [i.x.data_ptr() for i in inputs[name]] == [i.x.data_ptr() for i in inputs["ours"]]
        assert [i.dy.data_ptr() for i in inputs[name]] == [i.dy.data_ptr() for i in inputs["ours"]]
    dys = {name: {i.dy.data_ptr() for i in inputs[name]} for name in ("ours", "in_place")}
    assert not dys["ours"] & dys["in_place"]
    assert [i.x.data_ptr() for i in inputs["in_place"]] == [i.x.data_ptr() for i in inputs["ours"]]


def test_a_ratio_is_the_median_of_those_of_one_round() -> None:
    """The middle of 1, 5 and 4. The quotient of medians is 2, and 3 the middle of sorted ones."""
    assert paired_ratio([3.0, 10.0, 4.0], [3.0, 2.0, 1.0]) == 4.0
