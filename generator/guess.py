"""Which of some untried configs is most likely to beat the best: a Gaussian process over configs.

Two configs are alike as far as they agree in their knobs: the covariance is exp(-d / length) with d
the number of knobs in which they differ. Candidates are compared by expected improvement (Jones,
Schonlau and Welch, "Efficient Global Optimization of Expensive Black-Box Functions", 1998).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from generator.space import Space
from generator.store import Record
from generator.variant import Config

LENGTHS = (1.0, 2.0, 4.0, 8.0)
"""Lengths, in knobs, of which the most likely one is taken."""
NOISE = 0.01
"""Standard deviation of a measured ratio, relative."""
WORST = math.log(1.5)
"""Times beyond 1.5 times the best count as that, and so do trials without one: how bad they are
says nothing about the best."""
FEWEST = 5
"""Timed trials below which nothing is guessed."""

Floats = NDArray[np.float64]


class Guesser:
    """Guesses for one space."""

    def __init__(self, space: Space) -> None:
        self._places: dict[tuple[str, int | str], int] = {}
        for knob in space.knobs:
            for value in knob.choices:
                self._places[knob.name, value] = len(self._places)
        self._knobs = len(space.knobs)

    def best(
        self, records: Sequence[Record], pending: Sequence[Config], candidates: Sequence[Config]
    ) -> Config | None:
        """The candidate with the highest expected improvement over the best of `records`, the first
        of equals; None where there are none or too few records. pending: configs on their way,
        which count as being as fast as they are expected to be."""
        timed = [record.ratio for record in records if record.result.ratio is not None]
        if len(timed) < FEWEST or not candidates:
            return None
        worst = math.log(min(timed)) + WORST
        times = np.array(
            [min(math.log(r.ratio), worst) if r.result.ratio else worst for r in records]
        )
        model = _Process(self._rows([record.config for record in records]), times, self._knobs)
        if pending:
            model = model.believing(self._rows(pending))
        improvement = model.improvement(self._rows(candidates))
        return candidates[int(np.argmax(improvement))]

    def _rows(self, configs: Sequence[Config]) -> Floats:
        """One row for each config, with a one for each of its values."""
        rows = np.zeros((len(configs), len(self._places)))
        for row, config in zip(rows, configs, strict=True):
            row[[self._places[pair] for pair in config.items()]] = 1.0
        return rows


class _Process:
    """The posterior after `times` (log ratios) at `rows`."""

    def __init__(
        self, rows: Floats, times: Floats, knobs: int, length: float | None = None
    ) -> None:
        self.rows, self.times, self.knobs = rows, times, knobs
        self.mean = float(np.median(times))
        self.variance = max(float(np.var(times)), 1e-4)
        lengths = LENGTHS if length is None else (length,)
        self._factor, self._weights, self.length = max(
            (self._solved(candidate) for candidate in lengths),
            key=lambda solved: self._likelihood(solved[0], solved[1]),
        )

    def believing(self, rows: Floats) -> _Process:
        """The posterior when what is expected at `rows` comes true."""
        expected, _ = self._expected(rows)
        both = np.vstack([self.rows, rows]), np.concatenate([self.times, expected])
        return _Process(*both, self.knobs, self.length)

    def improvement(self, rows: Floats) -> Floats:
        """Expected improvement over the lowest time, in log ratio."""
        expected, spread = self._expected(rows)
        gain = self.times.min() - expected
        z = gain / spread
        below = 0.5 * (1 + np.array([math.erf(value) for value in z / math.sqrt(2)]))
        density = np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        improvement: Floats = gain * below + spread * density
        return improvement

    def _expected(self, rows: Floats) -> tuple[Floats, Floats]:
        """Mean and standard deviation."""
        across = self._covariance(rows, self.rows, self.length)
        reduced = np.linalg.solve(self._factor, across.T)
        variance = self.variance - (reduced**2).sum(axis=0)
        return self.mean + across @ self._weights, np.sqrt(np.maximum(variance, 1e-10))

    def _covariance(self, one: Floats, other: Floats, length: float) -> Floats:
        covariance: Floats = self.variance * np.exp((one @ other.T - self.knobs) / length)
        return covariance

    def _solved(self, length: float) -> tuple[Floats, Floats, float]:
        covariance = self._covariance(self.rows, self.rows, length)
        noisy = covariance + NOISE**2 * np.eye(len(self.times))
        factor = np.linalg.cholesky(noisy).astype(np.float64)
        half = np.linalg.solve(factor, self.times - self.mean)
        weights: Floats = np.linalg.solve(factor.T, half)
        return factor, weights, length

    def _likelihood(self, factor: Floats, weights: Floats) -> float:
        fit = (self.times - self.mean) @ weights
        return float(-0.5 * fit - np.log(np.diag(factor)).sum())
