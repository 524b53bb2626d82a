"""Searches of a swept space without a GPU: the search of this tuner beside others.

What runs is the tuner's own search; only its compiler and its evaluator answer from a recording.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cache, cached_property, lru_cache, partial
from math import inf
from typing import Any
from unittest.mock import patch

import optuna
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, TPESampler
from optuna.storages import InMemoryStorage
from optuna.trial import TrialState

from benchmarks.search_replay.recording import Recording
from benchmarks.search_replay.rivals import RepairingSampler, best_by
from generator.errors import NormforgeError
from generator.evaluate.gpu.session import SLOW
from generator.kernels.geometry import Config
from generator.kernels.nvrtc import Compiled
from generator.kernels.ptxas import Resources
from generator.kernels.strategies import is_deterministic
from generator.kernels.variant import AnyVariant
from generator.package.known_winners import known_winners
from generator.paths import GENERATED
from generator.problem import Problem
from generator.result import Result
from generator.search import sampler, search
from generator.search.budget import Budget
from generator.search.experience import Experience, Timed, by_distance, times_of
from generator.search.sampler import distributions
from generator.search.search import search_problem
from generator.search.surrogate import expected_improvement, log_odds
from generator.space.legal_configs import Key, LegalConfigs, Values
from generator.studies.reader import read_studies
from generator.studies.records import Record, Winner, study_name
from generator.studies.study_log import StudyLog
from generator.target import find_target
from normforge.spec import MAIN_KERNEL

CLOSE = 0.01
"""A search has succeeded when its best is at most this much slower than the optimum: less than that
counts as equal in the finals."""


COMPILERS = 15
"""Compilers of the machine with the H200, which had 16 cores. A search keeps them all busy, so it
proposes that many trials before it hears of the first. All searches have this lag."""


class Replayed:
    """A recording in the place of the compilers and of the GPU. Every variant compiles; one that
    did not, or that did not fit, has that outcome when it is evaluated."""

    evidence = "measured"

    def __init__(self, recording: Recording, processes: int = COMPILERS) -> None:
        self.recording, self.processes = recording, processes
        target = find_target(recording.gpu)
        self.legal = LegalConfigs(recording.space(), recording.problem, target)

    @cached_property
    def allowed(self) -> list[Values]:
        """Every legal config, in the order of the file."""
        return self.legal.first(len(self.recording.entries))

    @cached_property
    def configs(self) -> list[Values]:
        """Return the configs that may win if they are fast."""
        return [config for config in self.allowed if is_deterministic(config)]

    def ratio(self, config: Config) -> float:
        """Ratio to the floor by which a config is judged; infinite for one that may not win."""
        return self.recording.ratio(self._key(config))

    def told(self, config: Config) -> float:
        """The ratio that a search hears of, from the trial alone."""
        return self.recording.by_trial(self._key(config))

    def counts(self) -> dict[str, int]:
        """Configs that were recorded, that are legal, and legal ones within CLOSE of the best."""
        limit = self.recording.optimum * (1 + CLOSE)
        close = sum(self.ratio(config) <= limit for config in self.allowed)
        return {"recorded": len(self.recording.entries), "legal": len(self.allowed), "close": close}

    def submit(self, variant: AnyVariant) -> Future[Compiled]:
        _, cubin = self._entry(variant.config)
        arch = self.legal.target.arch
        kernels = {MAIN_KERNEL: Resources(32, 0, 0, 0)}
        future: Future[Compiled] = Future()
        future.set_result(Compiled(arch, "", str(cubin).encode(), kernels, "", False, ""))
        return future

    def result(self, variant: AnyVariant, future: Future[Compiled]) -> Compiled:
        return future.result()

    def code(self, variant: AnyVariant) -> str:
        return variant.id

    def evaluate(
        self, problem: Problem, variant: AnyVariant, compiled: Compiled, best_us: float | None
    ) -> Result:
        result, _ = self._entry(variant.config)
        if best_us is not None and result.timed and (result.us or 0.0) > SLOW * best_us:
            return replace(result, outcome="slow", determinism="unverified")
        return result

    def finals(self, problem: Problem, entries: list[tuple[AnyVariant, Compiled]]) -> list[Result]:
        return [self._entry(variant.config)[0] for variant, _ in entries]

    def _entry(self, config: Config) -> tuple[Result, int]:
        return self.recording.entries[self._key(config)]

    def _key(self, config: Config) -> Key:
        """Raises NormforgeError for a config without an entry."""
        key = self.recording.key(config)
        if key not in self.recording.entries:
            raise NormforgeError(
                f"{dict(config)} was not recorded: the rules of the space have changed since the "
                "sweep; sweep again with --record"
            )
        return key


def at_random(replayed: Replayed, trials: int, seed: int) -> list[float]:
    """Legal configs of a deterministic class, all equally likely, none twice."""
    known = replayed.configs
    drawn = random.Random(seed).sample(known, min(trials, len(known)))
    return [replayed.ratio(config) for config in drawn]


def by_sampler(
    replayed: Replayed, trials: int, seed: int, kind: Callable[..., BaseSampler], **options: Any
) -> list[float]:
    """Search by one of Optuna's samplers alone: its proposals are made legal and new, and there are
    no seeds."""
    repairing = RepairingSampler(replayed.legal, seed, kind(seed=seed, **options))
    study = optuna.create_study(sampler=repairing)
    pending: deque[tuple[optuna.Trial, float]] = deque()
    ratios: list[float] = []
    for _ in range(trials):
        trial = study.ask(distributions(replayed.legal.space))
        ratios.append(replayed.ratio(trial.params))
        pending.append((trial, replayed.told(trial.params)))
        if len(pending) > replayed.processes:
            told, ratio = pending.popleft()
            told.set_constraint("infeasible", 0.0 if ratio < inf else 1.0)
            if ratio < inf:
                study.tell(told, ratio)
            else:
                study.tell(told, state=TrialState.PRUNED)
    return ratios


def by_tuner(
    replayed: Replayed, trials: int, seed: int, winners: Sequence[Winner] = ()
) -> list[float]:
    """The search of this tuner, as for the first shape of a run where no winner is known."""
    storage, legal = InMemoryStorage(), replayed.legal
    budget = Budget(trials=trials)
    search_problem(legal, replayed, replayed, storage, budget, known_winners=winners, seed=seed)
    name = study_name(legal.problem, legal.target, replayed.evidence)
    records = [Record.from_trial(trial) for trial in StudyLog(storage, name).trials()]
    return [replayed.ratio(record.config) if record.feasible else inf for record in records]


def by_tuner_with_studies(replayed: Replayed, trials: int, seed: int) -> list[float]:
    """Search as the tuner does where other shapes have been searched, as in all runs but the first:
    their winners are known, and their trials."""
    legal, gpu = replayed.legal, replayed.recording.gpu
    size = (legal.problem.M, legal.problem.N)
    others = [
        winner
        for winner in known_winners(GENERATED / gpu / legal.problem.operation)
        if size != (winner.problem.M, winner.problem.N)
    ]
    with patch.object(search, "learn", lambda *_: learned(replayed)):
        return by_tuner(replayed, trials, seed, others)


@lru_cache(maxsize=1)
def learned(replayed: Replayed) -> Experience:
    """Return what `learn` finds in the committed studies, without those of the same M and N."""
    problem = replayed.legal.problem
    studies = [
        (other, trials)
        for other, trials in committed_trials(replayed.recording.gpu)
        if other.operation == problem.operation and (other.M, other.N) != (problem.M, problem.N)
    ]
    return Experience(replayed.legal, by_distance(problem, studies))


@cache
def committed_trials(gpu: str) -> list[Timed]:
    """Return the trials of every measured study of a GPU."""
    studies = read_studies(GENERATED / gpu)
    return [(s.problem, times_of(s.records)) for s in studies if s.evidence == "measured"]


def by_surrogate(
    replayed: Replayed, trials: int, seed: int, surrogate: Callable[..., int | None]
) -> list[float]:
    """The search of this tuner with another surrogate, and the same in all else."""
    with patch.object(sampler, "most_promising", surrogate):
        return by_tuner(replayed, trials, seed)


SEARCHES: Mapping[str, Callable[[Replayed, int, int], list[float]]] = {
    "random": at_random,
    "genetic": partial(by_sampler, kind=NSGAIISampler, population_size=20),
    "GP": partial(by_sampler, kind=GPSampler),
    "TPE, liar": partial(by_sampler, kind=TPESampler, multivariate=True, constant_liar=True),
    "TPE": partial(by_sampler, kind=TPESampler, multivariate=True, constant_liar=False),
    "odds alone": partial(by_surrogate, surrogate=partial(best_by, log_odds)),
    "improvement alone": partial(by_surrogate, surrogate=partial(best_by, expected_improvement)),
    "this tuner": by_tuner,
    "this tuner, warm": by_tuner_with_studies,
}
"""The searches by name. The liar counts what is under way as bad; a generation has 20."""
SEEDS_FOR_ONE = {"GP": 5}
"""The number of seeds of which only one is tried, for a search that takes minutes."""
