"""The order in which operations take turns: balanced, because each changes what the next one finds.
No CUDA here.

What an operation leaves in the L2 and how it leaves the clocks is part of the next one's time. If
that is always the same other one, this is a bias that no number of rounds takes away.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import pairwise
from random import Random

DRAWS = 32
"""Orders of which the most balanced one is taken."""

Orders = list[list[int]]
"""The operation in each place, for each round."""


def balanced_orders(count: int, rounds: int, seed: int = 0) -> Orders:
    """Return the order of `count` operations in each round, where each runs once, so that over all
    rounds each takes each place, and is followed by each other one, equally often, as far as
    `rounds` allow.

    Rounds are a ring, because a graph is replayed: its start follows its end. Within rounds both
    are exactly equal after `count` rounds, or twice as many where that is odd. None follows itself,
    except of two, where every other round is turned round, so that drift favours neither. seed:
    which of the operations have what is left over; in each block others should.
    """
    names = Random(seed).sample(range(count), count)
    return [[names[which] for which in row] for row in _unnamed(count, rounds)]


def successions(orders: Orders) -> Counter[tuple[int, int]]:
    """Count how often the second of two operations directly follows the first, over a ring of
    rounds."""
    line = [which for row in orders for which in row]
    return Counter(zip(line, line[1:] + line[:1], strict=True))


def places(orders: Orders) -> Counter[tuple[int, int]]:
    """Count how often each place is taken by each operation."""
    return Counter(taken for row in orders for taken in enumerate(row))


@lru_cache(maxsize=64)
def _unnamed(count: int, rounds: int) -> Orders:
    """The best of DRAWS; the same ones in every process."""
    if count < 3:
        return [list(range(count))[:: -1 if round_ % 2 else 1] for round_ in range(rounds)]
    rng = Random(f"{count} {rounds}")
    return min((_draw(count, rounds, rng) for _ in range(DRAWS)), key=_imbalance)


def _draw(count: int, rounds: int, rng: Random) -> Orders:
    """Draw rows of Williams squares, always the one that makes the least more frequent what has
    been frequent so far; by chance where several do."""
    found: Orders = []
    rows: Orders = []
    followed: Counter[tuple[int, int]] = Counter()
    taken: Counter[tuple[int, int]] = Counter()

    def pairs(row: list[int]) -> list[tuple[int, int]]:
        closing = [(row[-1], (found or [row])[0][0])] if len(found) == rounds - 1 else []
        return [*((last[-1], row[0]) for last in found[-1:]), *pairwise(row), *closing]

    def price(row: list[int]) -> tuple[int, float]:
        itself = sum(one == other for one, other in pairs(row)) * count * rounds
        often = sum(followed[pair] for pair in pairs(row))
        return itself + often + sum(taken[place] for place in enumerate(row)), rng.random()

    while len(found) < rounds:
        rows = rows or _williams(count, rng)
        row = min(rows, key=price)
        rows.remove(row)
        followed.update(pairs(row))
        taken.update(enumerate(row))
        found.append(row)
    return found


def _williams(count: int, rng: Random) -> Orders:
    """A design in which each of two is directly followed by the other once, or twice where `count`
    is odd (E. J. Williams, "Experimental designs balanced for the estimation of residual effects
    of treatments", 1949): 0, 1, n-1, 2, n-2, … with all its shifts; where n is odd also reversed.
    """
    names = rng.sample(range(count), count)
    first = [(place + 1) // 2 * (1 if place % 2 else -1) for place in range(count)]
    square = [[names[(which + shift) % count] for which in first] for shift in range(count)]
    return square + [row[::-1] for row in square] if count % 2 else square


def _imbalance(orders: Orders) -> int:
    """Return a number that is least where all are equally frequent, and none follows itself."""
    followed = successions(orders)
    itself = sum(followed[which, which] for which in orders[0])
    squares = sum(often**2 for often in (*followed.values(), *places(orders).values()))
    return squares + itself * len(orders) * len(orders[0])
