"""Learns from the trials of other shapes about the configs of one: gradient-boosted trees of
scikit-learn, fitted to the studies that the storage already has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil, exp, inf, log
from typing import Any, TypeVar

import numpy as np
from optuna.storages import BaseStorage

from generator.errors import NormforgeError
from generator.kernels.geometry import Config
from generator.kernels.knobs import KNOBS
from generator.kernels.variant import make_variant
from generator.problem import FORWARDS, Problem
from generator.search.starts import distance
from generator.search.surrogate import WORST
from generator.space.expressions import OF_ROWS
from generator.space.legal_configs import LegalConfigs
from generator.studies.records import UNREADABLE, Record, StudyFacts, over_median_floor
from generator.studies.study_log import StudyLog, without_copied

STUDIES = 32
"""The nearest ones, from which it learns: in the replay of three spaces more were no better, and 16
not as good."""
FEWEST_TRIALS = 100
"""The fewest trials from which anything is learned."""
DECAY = 0.15
"""The weight of a trial falls by a factor of e for every such step that it is behind the best."""

T = TypeVar("T")
Timed = tuple[Problem, Sequence[tuple[Config, float]]]
"""A problem, and times of configs in any unit, infinite for those that may not win."""


class TooFewTrialsError(Exception):
    """There is nothing to learn from."""


class Experience:
    """Expects times of the configs of `legal` from those of other problems on the same GPU: of the
    first STUDIES of `studies` with times. Raises TooFewTrialsError."""

    def __init__(self, legal: LegalConfigs, studies: Iterable[Timed]) -> None:
        from sklearn.ensemble import HistGradientBoostingRegressor  # here: it loads for a second

        self.legal = legal
        rows: list[list[float]] = []
        logs: list[float] = []
        weights: list[float] = []
        used = 0
        for problem, trials in studies:
            best = min((time for _, time in trials), default=inf)
            near = 1 / (0.5 + _distance(problem, legal.problem))
            before = len(rows)
            for config, time in trials:
                if time == inf:
                    continue
                # The trial may be of a space with other knobs.
                with suppress(KeyError, ValueError, NormforgeError):
                    rows.append(self._features(config, problem))
                    logs.append(log(min(time / best, WORST)))
                    weights.append(near * exp(-(time / best - 1) / DECAY))
            used += len(rows) > before
            if used == STUDIES:
                break
        if len(rows) < FEWEST_TRIALS:
            raise TooFewTrialsError
        model = HistGradientBoostingRegressor(random_state=0)
        with _one_thread():
            self._model = model.fit(np.array(rows), np.array(logs), sample_weight=weights)

    def expect(self, configs: Sequence[Config]) -> list[float]:
        """The logarithm of the time over that of the best config, for each of some legal ones."""
        if not configs:
            return []
        rows = [self._features(config, self.legal.problem) for config in configs]
        with _one_thread():
            return [float(value) for value in self._model.predict(np.array(rows))]

    def _features(self, config: Config, problem: Problem) -> list[float]:
        """The knobs, the numbers that rules of the space may use, and the shape."""
        config = replace(self.legal, problem=problem).complete(config)
        target, variant = self.legal.target, make_variant(config, problem)
        derived = {name: d.value(variant, problem, target) for name, d in OF_ROWS.items()}
        rounds = derived["batches"] / max(1, derived["participants"] * derived["teams"])
        size = (problem.M, problem.N, problem.M * problem.N * problem.itemsize)
        items = (problem.itemsize, problem.weight_itemsize, problem.residual_itemsize)
        knobs = [_number(knob.name, config[knob.name]) for knob in self.legal.space.knobs]
        return [*knobs, *derived.values(), *size, *items, rounds, ceil(rounds) / rounds]


def _number(name: str, value: int | str) -> int:
    return value if isinstance(value, int) else [*KNOBS[name].domain].index(value)


def _distance(one: Problem, other: Problem) -> float:
    return distance(one, other) + 0.25 * (one.residual != other.residual)


def by_distance(problem: Problem, others: Iterable[tuple[Problem, T]]) -> list[tuple[Problem, T]]:
    """Sort the entries of other problems by their distance, the nearest first."""
    return sorted(others, key=lambda other: _distance(other[0], problem))


def learn(legal: LegalConfigs, storage: BaseStorage, evidence: str) -> Experience | None:
    """Learn from the studies of other shapes in a storage, of the same operation, GPU and evidence;
    None when they have too few trials, for predictions, whose model knows more, and for forwards of
    RMSNorm, all of which are tried."""
    if evidence == "predicted" or legal.problem.operation in FORWARDS:
        return None
    problem, place = legal.problem, (legal.target.name, legal.target.sms, evidence)
    others: list[tuple[Problem, str]] = []
    for entry in without_copied(storage.get_all_studies()):
        facts = StudyFacts.of_name(entry.study_name)
        if facts is None or facts[1:] != place or facts.problem == problem:
            continue
        if facts.problem.operation == problem.operation:
            others.append((facts.problem, entry.study_name))
    ordered = by_distance(problem, others)
    try:
        return Experience(legal, ((other, _times(storage, name)) for other, name in ordered))
    except TooFewTrialsError:
        return None


def times_of(records: Sequence[Record]) -> list[tuple[Config, float]]:
    """The configs of one study and their times over its median floor."""
    times = over_median_floor([record.result for record in records])
    return [(r.config, t if r.feasible else inf) for r, t in zip(records, times, strict=True)]


def _times(storage: BaseStorage, name: str) -> list[tuple[Config, float]]:
    log = StudyLog(storage, name)
    try:
        return times_of([Record.from_trial(trial) for trial in log.current_trials()])
    except UNREADABLE:
        return []  # damaged, or of another version: a search goes on without it


def _one_thread() -> Any:
    """Limit OpenMP to one thread: more would wait for cores on which compilers run."""
    from threadpoolctl import threadpool_limits

    return threadpool_limits(1, "openmp")
