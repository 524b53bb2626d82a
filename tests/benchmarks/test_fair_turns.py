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

from benchmarks.gpu import BLOCKS, ROUNDS
from benchmarks.harness import Contender, ShapeRun
from generator.evaluate.gpu import rotation
from generator.evaluate.gpu.rotation import FLUSH, ROTATION, Operation
from generator.evaluate.gpu.timer import Timer
from generator.operations.rmsnorm_backward import Inputs
from generator.problem import Problem
from normforge.serve.reference import reference_backward
from tests.support.fake_clock import FakeClock

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
    """Keeps what ran in each block."""

    def __init__(self, clock: FakeClock, condition: str) -> None:
        super().__init__(torch.device("cpu"), condition=condition)
        self.clock = clock
        self.blocks: list[tuple[int, list[str]]] = []

    def block(self, operations: Sequence[Operation], rounds: int) -> list[list[float]]:
        start = len(self.clock.log)
        times = super().block(operations, rounds)
        self.blocks.append((len(operations), self.clock.log[start:]))
        return times


@pytest.fixture(params=[FLUSH, ROTATION])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A finished run; its `timer`, and the `machine` on which it ran."""
    clock = FakeClock(monkeypatch)
    for name in ("SETS_BYTES", "L2_TIMES"):  # the shape is so small that there would be thousands
        monkeypatch.setattr(rotation, name, 0)
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
