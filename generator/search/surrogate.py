"""Which of some untried configs is most likely to beat the best: a Gaussian process over configs.

Two configs are alike as far as they agree in their knobs: the covariance is exp(-d / length) with d
the sum of the weights of the knobs in which they differ. Candidates are compared by expected
improvement (Jones, Schonlau and Welch, "Efficient Global Optimization of Expensive Black-Box
Functions", 1998).

A trial can be over in 15 ms, and a proposal has to take less than that. So what stays true from one
proposal to the next is kept, and the variance, which costs far more than the mean, is computed only
for candidates that may still win.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from generator.space.legal_configs import Key
from generator.space.space import Space
from generator.studies.records import Record

WEIGHTS: Mapping[str, int] = {
    "cluster": 22,
    "ctas_per_sm": 19,
    "rows_per_cta": 19,
    "order": 18,
    "strategy": 15,
    "register_cap": 14,
    "rows_in_flight": 14,
    "threads_per_row": 13,
    "pipeline": 12,
    "vector_bytes": 12,
    "reload": 9,
    "levels": 8,
    "load_hint": 7,
    "min_blocks": 6,
    "stages": 6,
    "weight_in": 6,
    "grid": 5,
    "overlap": 5,
    "slice_columns": 5,
    "store_hint": 5,
    "sum_threads": 5,
}
"""How much it says that two configs differ in a knob: the most likely weights for each of 67 shapes
on one H200 (17,000 trials), averaged over the shapes where the knob varies, and 4 more for each
knob, since shapes differ. Whole numbers, which together stay below 256. Picking from the trials of
34 of these shapes, 16 random ones first, it took 52 proposals to be within 0.5 % of the best in
half of the searches. With equal weights half were not there after 84, with the most likely weights
alone after 66."""
OTHER_WEIGHT = 10
"""Of a knob that is not among these."""
LENGTHS = (8.0, 16.0, 32.0, 64.0, 128.0)
"""Lengths, in the unit of the weights, of which the most likely one is taken."""
GROWTH = 1.1
"""Length and variance are estimated anew when there are so many times as many records."""
NOISE = 0.01
"""Standard deviation of a measured ratio, relative."""
WORST = math.log(1.5)
"""Times beyond 1.5 times the best count as that, and so do trials without one: how bad they are
says nothing about the best."""
FEWEST = 5
"""Timed trials below which the surrogate proposes nothing."""
_AT_ONCE = 64
"""Candidates whose variance is computed before it is asked whether others may still win."""

Floats = NDArray[np.float64]
Rows = NDArray[np.float32]
"""A row for every config: for each of its values the square root of the knob's weight."""
Counts = NDArray[np.uint8]
"""Weights of the knobs in which the config of a row and that of a column agree."""


class Surrogate:
    """The surrogate of one space. It is cheap to ask where records and candidates only grow."""

    def __init__(self, space: Space) -> None:
        self._names = [knob.name for knob in space.knobs]
        self._places: dict[tuple[str, int | str], int] = {}
        for knob in space.knobs:
            for value in knob.choices:
                self._places[knob.name, value] = len(self._places)
        self._weights = [WEIGHTS.get(name, OTHER_WEIGHT) for name in self._names]
        total, most = sum(self._weights), int(np.iinfo(np.uint8).max)
        if total > most:  # by knobs that have no weight: smaller ones in proportion, none of them 0
            room = most - len(self._weights)
            self._weights = [1 + weight * room // total for weight in self._weights]
        self._process = _Process(sum(self._weights))
        self._known: list[int] = []  # numbers of the records behind the process
        self._estimated = 0  # how many they were when it was estimated
        # Every config seen so far has a number, its place in the following.
        self._numbers: dict[Key, int] = {}
        self._rows: Rows = np.zeros((0, len(self._places)), np.float32)
        self._agree: Counts = np.zeros((0, 0), np.uint8)  # with those of _known
        self._spreads: Floats = np.zeros(0)  # the last ones computed

    def best(
        self,
        records: Sequence[Record],
        tried: Sequence[Key],
        pending: Sequence[Key],
        candidates: Sequence[Key],
    ) -> Key | None:
        """The candidate with the highest expected improvement over the best of `records`, the first
        of equals; None where there are none or too few records. tried: the configs of `records`;
        pending: those on their way, which count as being as fast as they are expected to be."""
        timed = [record.ratio for record in records if record.result.ratio is not None]
        if len(timed) < FEWEST or not candidates:
            return None
        worst = math.log(min(timed)) + WORST
        times = np.array(
            [min(math.log(r.ratio), worst) if r.result.ratio else worst for r in records]
        )
        known, waiting, numbers = map(self._numbered, (tried, pending, candidates))
        self._learn(known, times)
        expected = self._process.expected(self._agree, times)
        lowest = min(times.min(), expected[waiting].min(initial=np.inf))
        return candidates[self._most_promising(numbers, lowest - expected[numbers], waiting)]

    def _numbered(self, keys: Sequence[Key]) -> list[int]:
        numbers = [self._numbers.setdefault(key, len(self._numbers)) for key in keys]
        new = list(islice(self._numbers, len(self._rows), None))
        rows = np.zeros((len(new), len(self._places)), np.float32)
        for row, key in zip(rows, new, strict=True):
            places = [self._places[pair] for pair in zip(self._names, key, strict=True)]
            row[places] = np.sqrt(self._weights)
        self._rows = np.vstack([self._rows, rows])
        self._agree = np.vstack([self._agree, _agreement(rows, self._rows[self._known])])
        self._spreads = np.append(self._spreads, np.full(len(new), np.inf))
        return numbers

    def _learn(self, known: list[int], times: Floats) -> None:
        """Bring the process up to these records."""
        before = len(self._known)
        if known[:before] == self._known and len(known) < GROWTH * self._estimated:
            rows = self._rows[known[before:]]
            self._process = self._process.grown(self._agree[known[before:]], _agreement(rows, rows))
            self._agree = np.hstack([self._agree, _agreement(self._rows, rows)])
        else:
            self._agree = _agreement(self._rows, self._rows[known])
            self._process = _most_likely(self._agree[known], times, sum(self._weights))
            self._estimated = len(known)
            self._spreads[:] = np.inf
        self._known = known

    def _most_promising(self, numbers: list[int], gains: Floats, waiting: list[int]) -> int:
        """The place of the highest expected improvement once those that are waiting are known: that
        changes no expectation where they come out as expected, but makes spreads smaller.

        A spread never grows while more becomes known, so the last one bounds the improvement from
        above, and few have to be computed anew."""
        soon = self._rows[waiting]
        process = self._process.grown(self._agree[waiting], _agreement(soon, soon))
        numbered = np.array(numbers)
        bounds = np.minimum(self._spreads[numbered], math.sqrt(process.variance))
        at_most = _improvement(gains, bounds)
        order = np.argsort(-at_most, kind="stable")
        found = np.full(len(numbers), -np.inf)
        for start in range(0, len(order), _AT_ONCE):
            some = order[start : start + _AT_ONCE]
            if at_most[some[0]] < found.max():
                break
            these = numbered[some]
            agree = np.hstack([self._agree[these], _agreement(self._rows[these], soon)])
            self._spreads[these] = process.spread(agree)
            found[some] = _improvement(gains[some], self._spreads[these])
        return int(np.argmax(found))


@dataclass(frozen=True)
class _Process:
    """What is known of any config when some have been tried. total: sum of all weights; inverse:
    that of the Cholesky factor of their covariance with noise."""

    total: int
    length: float = 1.0
    variance: float = 1.0
    inverse: Floats = field(default_factory=lambda: np.zeros((0, 0)))

    def grown(self, across: Counts, own: Counts) -> _Process:
        """With more tried: across are their agreements with the known ones, own with each other."""
        reduced = self._covariance[across] @ self.inverse.T
        noisy = self._covariance[own] + NOISE**2 * np.eye(len(own))
        corner = np.linalg.inv(np.linalg.cholesky(noisy - reduced @ reduced.T))
        above = np.pad(self.inverse, ((0, 0), (0, len(own))))
        below = np.hstack([-corner @ (reduced @ self.inverse), corner])
        return replace(self, inverse=np.vstack([above, below]))

    def expected(self, agree: Counts, times: Floats) -> Floats:
        """Log ratios of the rows when the known ones have `times`."""
        mean = np.median(times)
        weights = self.inverse.T @ (self.inverse @ (times - mean))
        # Single precision, because they are thousands: the error is far below the noise.
        covariance, single = self._covariance.astype(np.float32), weights.astype(np.float32)
        blocks = np.array_split(agree, 1 + len(agree) // 1024)
        return mean + np.concatenate([np.take(covariance, block) @ single for block in blocks])

    def spread(self, agree: Counts) -> Floats:
        """Standard deviations of what is expected of the rows."""
        reduced = self._covariance[agree] @ self.inverse.T
        spread: Floats = np.sqrt(np.maximum(self.variance - (reduced**2).sum(axis=1), 1e-10))
        return spread

    def likelihood(self, times: Floats) -> float:
        """Logarithm, up to a constant."""
        fit = self.inverse @ (times - np.median(times))
        return float(np.log(np.diag(self.inverse)).sum() - 0.5 * fit @ fit)

    @cached_property
    def _covariance(self) -> Floats:
        """Of two configs, by the weights of the knobs in which they agree."""
        differ = np.arange(self.total, -1, -1)
        covariance: Floats = self.variance * np.exp(-differ / self.length)
        return covariance


def _most_likely(agree: Counts, times: Floats, total: int) -> _Process:
    """After `times`, without anything known before."""
    variance, nothing = max(float(np.var(times)), 1e-4), agree[:, :0]
    fits = (_Process(total, length, variance).grown(nothing, agree) for length in LENGTHS)
    return max(fits, key=lambda process: process.likelihood(times))


def _agreement(one: Rows, other: Rows) -> Counts:
    return np.rint(one @ other.T).astype(np.uint8)


def _improvement(gains: Floats, spreads: Floats) -> Floats:
    """Expected improvement, in log ratio, where `gains` are expected."""
    z = gains / spreads
    below = 0.5 * (1 + np.array([math.erf(value) for value in z / math.sqrt(2)]))
    density = np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    improvement: Floats = gains * below + spreads * density
    return improvement
