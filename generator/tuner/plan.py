"""The plan of one tuning run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from generator.operations import Operation, operation_of
from generator.problem import FORWARDS, Problem
from generator.search.budget import FORWARD_TRIALS, Budget
from generator.space.load import UNPREDICTED, load_space_once, space_file
from generator.space.space import Space
from generator.studies.records import Winner, study_name, without_space
from generator.studies.storage import JOURNAL_NAME, is_shared
from generator.target import Target

# Least squares over 52 studies on an H200 (400 trials each, 7.6 s to 64 s).
_SECONDS_PER_PROBLEM = 7.5
_SECONDS_PER_GIGABYTE = 8.4


@dataclass(frozen=True)
class Plan:
    """The work of one tuning run. trials: of each problem; further: whether they come on top of
    those of a problem's last finals, which `had` then tells by study; seconds: of search in the
    whole run, in equal shares for the problems, None for no limit; storage: a database URL or None
    for the journal in `out`; devices: indices of the GPUs of this machine that measure, none to
    predict; fallbacks: one of `generator.package.fallback_kernels.FALLBACKS`; standalone: whether
    the package gets a copy of the library."""

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
    further: bool = False
    had: Mapping[str, int] = field(default_factory=dict)

    @property
    def evidence(self) -> str:
        """`measured` or `predicted`."""
        return "measured" if self.devices else "predicted"

    @property
    def operation(self) -> Operation:
        """The operation that all of its problems are calls of."""
        return operation_of(self.problems[0])

    @property
    def searched(self) -> tuple[Problem, ...]:
        """The problems, and behind them their forwards where the package has such kernels: one for
        every shape, whatever the options."""
        forward = self.operation.forward
        shapes = ((p.M, p.N, p.dtype, p.weight_dtype) for p in self.problems if forward)
        return (*self.problems, *(Problem(*s, operation=forward) for s in dict.fromkeys(shapes)))

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
        """Read from its file in every process: a space holds compiled rules."""
        space = load_space_once(self.space_file)
        return space if self.devices else space.without(*UNPREDICTED)

    def space_of(self, problem: Problem) -> Space:
        """The space of the plan, and of a forward its own."""
        if problem.operation in FORWARDS:
            return load_space_once(space_file(problem.operation))
        return self.space

    @property
    def where(self) -> str | Path:
        """The place of the studies, as `generator.studies.storage.open_storage` takes it."""
        return self.storage or self.out / JOURNAL_NAME

    @property
    def shared(self) -> bool:
        """True when other runs may search the same problems at the same time."""
        return is_shared(self.storage)

    def budget(self, problem: Problem) -> Budget:
        """Return the budget of one problem. A forward takes none of the seconds."""
        if problem.operation in FORWARDS:
            return Budget(FORWARD_TRIALS[self.evidence])
        seconds = self.seconds and self.seconds * self.parallel_searches / len(self.problems)
        return Budget(self.trials + self.had.get(self.study(problem), 0), seconds)

    def on_top_of(self, winners: Sequence[Winner]) -> Plan:
        """The plan itself, or with `further` one that has the trials behind these winners. They are
        read once: a problem that is claimed again gets no more."""
        if not self.further:
            return self
        return replace(self, had={without_space(w.study): w.trials for w in winners})

    def study(self, problem: Problem) -> str:
        """The name of the study of a problem."""
        return study_name(problem, self.target, self.evidence)


def longest_first(problems: Sequence[Problem]) -> list[Problem]:
    """The order in which several GPUs take problems, so that they end at about the same time:
    forwards, which take less, behind all others."""

    def order(problem: Problem) -> tuple[bool, float]:
        return problem.operation in FORWARDS, -expected_seconds(problem)

    return sorted(problems, key=order)


def expected_seconds(problem: Problem) -> float:
    """Seconds of 400 trials on an H200. Only the ratios of problems count, and other GPUs have
    much the same ones."""
    gigabytes = operation_of(problem).traffic_bytes(problem) / 1e9
    return _SECONDS_PER_PROBLEM + _SECONDS_PER_GIGABYTE * gigabytes
