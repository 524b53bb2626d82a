"""The plan of one tuning run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from generator.kernels.forward import ForwardVariant
from generator.operations import Operation, operation_of
from generator.problem import Problem
from generator.search.budget import Budget
from generator.space.forward_space import forwards_with
from generator.space.load import load_space_once
from generator.space.space import Space
from generator.studies.records import study_name
from generator.studies.storage import JOURNAL_NAME, is_shared
from generator.target import Target

# Least squares over 52 studies on an H200 (400 trials each, 7.6 s to 64 s).
_SECONDS_PER_PROBLEM = 7.5
_SECONDS_PER_GIGABYTE = 8.4


@dataclass(frozen=True)
class Plan:
    """The work of one tuning run. trials: of each problem; seconds: of search in the whole run, in
    equal shares for the problems, None for no limit; storage: a database URL or None for the
    journal in `out`; devices: indices of the GPUs of this machine that measure, none to predict;
    fallbacks: one of `generator.package.fallback_kernels.FALLBACKS`; standalone: whether the
    package gets a copy of the library."""

    target: Target
    problems: tuple[Problem, ...]
    space_file: Path
    out: Path
    trials: int
    seconds: float | None = None
    storage: str | None = None
    seed: int = 0
    devices: tuple[int, ...] = ()
    fallbacks: str = "common"
    standalone: bool = False

    @property
    def evidence(self) -> str:
        """`measured` or `predicted`."""
        return "measured" if self.devices else "predicted"

    @property
    def operation(self) -> Operation:
        """The operation that all of its problems are calls of."""
        return operation_of(self.problems[0])

    @property
    def package(self) -> Path:
        """The package that the run writes or extends."""
        return self.out / self.operation.name

    @property
    def fallbacks_of_operation(self) -> str:
        """`fallbacks`, but "none" where the operation has no such kernels."""
        return self.fallbacks if self.operation.fallbacks else "none"

    @property
    def parallel_searches(self) -> int:
        """Searches at the same time in this run, on this machine."""
        return max(1, len(self.devices))

    @property
    def space(self) -> Space:
        """Read from its file in every process: a space holds compiled rules. The model of predicted
        times was fitted to no kernel with a producer, so that a prediction would be a guess."""
        space = load_space_once(self.space_file)
        return space if self.devices else space.without("pipeline", "producer")

    @property
    def where(self) -> str | Path:
        """The place of the studies, as `generator.studies.storage.open_storage` takes it."""
        return self.storage or self.out / JOURNAL_NAME

    @property
    def shared(self) -> bool:
        """True when other runs may search the same problems at the same time."""
        return is_shared(self.storage)

    @property
    def budget(self) -> Budget:
        """The budget of one problem."""
        seconds = self.seconds and self.seconds * self.parallel_searches / len(self.problems)
        return Budget(self.trials, seconds)

    def forwards(self, problem: Problem, target: Target) -> list[ForwardVariant]:
        """Return the variants that a shape's forward is chosen from: all, but for what the search
        space fixes."""
        return forwards_with(self.space.fixed_forward_for(problem), problem, target)

    def study(self, problem: Problem) -> str:
        """The name of the study of a problem."""
        return study_name(problem, self.target, self.evidence)


def longest_first(problems: Sequence[Problem]) -> list[Problem]:
    """The order in which several GPUs take problems, so that they end at about the same time."""
    return sorted(problems, key=expected_seconds, reverse=True)


def expected_seconds(problem: Problem) -> float:
    """Seconds of 400 trials on an H200. Only the ratios of problems count, and other GPUs have
    much the same ones."""
    gigabytes = operation_of(problem).traffic_bytes(problem) / 1e9
    return _SECONDS_PER_PROBLEM + _SECONDS_PER_GIGABYTE * gigabytes
