"""The orders in which operations take turns, and the timer's launches on a clock of its own."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, permutations

import pytest
import torch

from generator.evaluate.gpu.order import balanced_orders, places, successions
from generator.evaluate.gpu.session import FINAL_ROUNDS, SEARCH_ROUNDS
from generator.evaluate.gpu.timer import Timer
from tests.support.fake_clock import FakeClock

COUNTS = range(2, 13)


@pytest.mark.parametrize("count", COUNTS)
def test_whole_designs_are_exactly_balanced_within_rounds(count: int) -> None:
    for rounds in (times * count * (1 + count % 2) for times in (1, 2, 3)):
        orders = balanced_orders(count, rounds)
        assert all(sorted(row) == list(range(count)) for row in orders)
        within = Counter(pair for row in orders for pair in pairwise(row))
        assert set(within.values()) == {rounds // count} and len(within) == count * (count - 1)
        assert set(places(orders).values()) == {rounds // count}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("rounds", [7, 9, SEARCH_ROUNDS, FINAL_ROUNDS, 30, 45])
@pytest.mark.parametrize("seed", [0, 1])
def test_other_orders_are_nearly_balanced(count: int, rounds: int, seed: int) -> None:
    orders = balanced_orders(count, rounds, seed)
    assert len(orders) == rounds
    assert all(sorted(row) == list(range(count)) for row in orders)
    followed, taken = successions(orders), places(orders)
    often = [followed[pair] for pair in permutations(range(count), 2)]
    assert max(often) - min(often) <= 3 and max(often) <= rounds / (count - 1) + 2
    each = [taken[place, which] for place in range(count) for which in range(count)]
    assert max(each) - min(each) <= 2
    if count > 2:
        assert not any(followed[which, which] for which in range(count))


def test_of_two_every_other_round_is_turned_round() -> None:
    assert balanced_orders(2, 4, seed=3) == [[0, 1], [1, 0], [0, 1], [1, 0]]
    assert balanced_orders(1, 3) == [[0], [0], [0]]


def test_an_order_depends_on_nothing_but_its_arguments() -> None:
    assert balanced_orders(5, 15, 1) == balanced_orders(5, 15, 1) != balanced_orders(5, 15, 2)
    balanced_orders(4, 8)[0].clear()
    assert all(len(row) == 4 for row in balanced_orders(4, 8)), "nobody changes what is kept"


@pytest.mark.parametrize("count", COUNTS)
def test_nobody_follows_always_the_same_one(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """The log of the last replay, for which times are kept, and of the one before it."""
    clock = FakeClock(monkeypatch)
    names = [f"operation {which}" for which in range(count)]
    operations = [clock.operation(name, 10.0 + us) for us, name in enumerate(names)]
    timer = Timer(torch.device("cpu"))
    times = timer.block(operations, 15)
    assert times == [[pytest.approx(10.0 + us)] * 15 for us in range(count)]

    replayed = clock.log[count:]
    launches = [name for name in replayed if name != "flush"]
    assert replayed[0::2] == ["flush"] * len(launches), "one before each, and outside its time"
    last = launches[-15 * count :]
    assert len(launches) >= 2 * len(last)
    follow = Counter(pairwise(launches[-15 * count - 1 :]))
    often = [follow[pair] for pair in permutations(names, 2)]
    assert max(often) - min(often) <= 3 and sum(follow.values()) == 15 * count
    assert follow[names[0], names[0]] == 0 or count == 2
    for place in range(count):
        assert max(Counter(last[place::count]).values()) <= 15 / count + 2


def test_each_block_has_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(monkeypatch)
    operations = [clock.operation(name, 10.0) for name in "abcde"]
    timer, seen = Timer(torch.device("cpu")), []
    for _ in range(3):
        timer.block(operations, 15)
        seen.append("".join(name for name in clock.log[-150:] if name != "flush"))
    assert len(set(seen)) == 3


def test_what_slows_the_next_one_slows_all_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """One leaves behind what costs the next one 4 us. In cyclic order one of them would pay it in
    nearly every round."""
    clock = FakeClock(monkeypatch)
    left = {"us": 0.0}

    def operation(name: str, leaves: float) -> object:
        def work() -> None:
            clock.now += 30.0 + left["us"]
            left["us"] = leaves

        return lambda: clock.do(work)

    operations = [operation("hinted", 4.0), *(operation(name, 0.0) for name in "abc")]
    hinted, *others = Timer(torch.device("cpu")).block(operations, 15)  # type: ignore[arg-type]
    assert sum(hinted) == pytest.approx(15 * 30.0)
    assert [sum(own) / 15 for own in others] == [pytest.approx(30 + 4 / 3, abs=0.3)] * 3
