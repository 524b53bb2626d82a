"""The condition `rotation`: who takes which inputs and outputs, on a clock of its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from generator.evaluate.gpu.rotation import ROTATION, copies, sets_for
from generator.evaluate.gpu.timer import Timer
from generator.evaluate.gpu.workload import Workload
from generator.problem import Problem
from tests.support.fake_clock import FREE_BYTES, L2_BYTES, FakeClock

CPU = torch.device("cpu")


@pytest.mark.parametrize("set_bytes", [1 << 20, 6 << 20, 48 << 20, 192 << 20, 2 << 30])
@pytest.mark.parametrize("l2_bytes", [40 << 20, 60 << 20, 126 << 20])
def test_sets_are_more_than_twice_the_l2(set_bytes: int, l2_bytes: int) -> None:
    number = sets_for(set_bytes, l2_bytes, FREE_BYTES)
    assert (number - 1) * set_bytes >= max(2 * l2_bytes, 192 << 20)
    assert number >= 6


def test_large_inputs_leave_three_quarters_of_what_is_free() -> None:
    """They rotate as long as one set displaces another one."""
    assert [sets_for(gib << 30, 60 << 20, FREE_BYTES) for gib in (3, 5, 13, 15)] == [6, 4, 2, 2]
    assert sets_for(16 << 30, 60 << 20, FREE_BYTES) == 1
    assert sets_for(100 << 20, 60 << 20, 700 << 20) == 1, "two sets do not fit beside the first"
    assert sets_for(100 << 20, 60 << 20, 800 << 20) == 3


def test_small_inputs_are_flushed() -> None:
    """Thousands of copies would take longer to set up than to time."""
    assert sets_for(200 << 10, 60 << 20, FREE_BYTES) > 900
    for set_bytes in (180 << 10, 384):
        assert sets_for(set_bytes, 60 << 20, FREE_BYTES) == 1


def test_a_timer_flushes_or_rotates(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeClock(monkeypatch)
    flushing, rotating = Timer(CPU), Timer(CPU, condition=ROTATION)
    assert flushing.sets(6 << 20) == 1
    assert rotating.sets(6 << 20) == sets_for(6 << 20, L2_BYTES, FREE_BYTES) == 33
    facts = {"order": "balanced", "flush_bytes": 256 << 20}
    assert flushing.facts() == {"condition": "flush", **facts}
    assert rotating.facts() == {"condition": "rotation", **facts}


@pytest.mark.parametrize(("count", "sets"), [(2, 6), (3, 33), (5, 7), (8, 6), (1, 33), (2, 70)])
def test_each_set_is_the_one_used_longest_ago(
    monkeypatch: pytest.MonkeyPatch, count: int, sets: int
) -> None:
    """It is also where a replay follows another, whatever the number of launches is, and where
    there are more sets than launches."""
    clock = FakeClock(monkeypatch)

    def operation(name: str) -> list[Callable[[], None]]:
        return [clock.operation(f"{name} {number}", 20.0) for number in range(sets)]

    times = Timer(CPU, condition=ROTATION).block([operation(f"op{i}") for i in range(count)], 15)
    assert times == [[pytest.approx(20.0)] * 15] * count
    replay = clock.log[count * sets :]
    length = sets + 15 * count
    assert len(replay) % length == 0 and len(replay) >= 2 * length
    assert not any("flush" in name for name in replay)
    used = [int(name.split()[1]) for name in replay]
    for start in range(sets, length):
        assert len({*used[start - sets + 1 : start + 1]}) == sets
    for name in (f"op{i}" for i in range(count)):
        assert sum(entry.split()[0] == name for entry in replay[sets:length]) == 15


def test_an_operation_with_one_set_is_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(monkeypatch)
    Timer(CPU, condition=ROTATION).block([clock.operation("alone", 5.0)], 3)
    assert clock.log[1:] == ["flush", "alone"] * (len(clock.log) // 2)


def test_results_live_until_their_set_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs that a call makes anew rotate through memory, too."""
    FakeClock(monkeypatch)
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def call() -> torch.Tensor:
        alive.append(sum(ref() is not None for ref in made))
        result = torch.empty(1)
        made.append(weakref.ref(result))
        return result

    timer = Timer(CPU, condition=ROTATION)
    timer.block([[call] * 6, [call] * 6], 15)
    launched = alive[12:]
    assert max(launched) == 5 and launched[5:] == [5] * (len(launched) - 5)
    alive.clear(), made.clear()
    Timer(CPU).block([call, call], 15)
    assert not any(alive), "a flush leaves nothing to be kept"


def test_sets_hold_the_same_numbers_in_places_of_their_own() -> None:
    workload = Workload(Problem.parse("6x16:bf16"), CPU)
    sets = workload.sets(3)
    assert sets[0][0] is workload.inputs and workload.sets(2) == sets[:2]
    for name in ("x", "dy", "rstd", "weight"):
        tensors = [getattr(inputs, name) for inputs, _ in sets]
        assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)
        assert len({tensor.data_ptr() for tensor in tensors}) == 3
    for name in ("dx", "dw"):
        assert len({places[name].data_ptr() for _, places in sets}) == 3
    assert len(copies(workload.inputs, 1)) == 1


def test_the_floor_and_kernels_have_a_call_for_each_set() -> None:
    workload = Workload(Problem.parse("6x16:bf16"), CPU)
    seen: list[tuple[int, int]] = []

    class Bench:
        def run(self, inputs: object, *, instead: dict[str, torch.Tensor]) -> None:
            seen.append((inputs.x.data_ptr(), instead["dx"].data_ptr()))  # type: ignore[attr-defined]

    floor, ours = workload.operations([Bench()], 4)  # type: ignore[list-item]
    assert len(floor) == len(ours) == 4
    for call in ours:
        call()
    wanted = [(i.x.data_ptr(), places["dx"].data_ptr()) for i, places in workload.sets(4)]
    assert seen == wanted and len({*seen}) == 4

    def of_set(_: object, inputs: Any, places: Any) -> tuple[int, int]:
        return inputs.x.data_ptr(), places["dx"].data_ptr()

    workload.operation = SimpleNamespace(floor=of_set)  # type: ignore[assignment]
    assert workload.operations([], 4)[0] == wanted
