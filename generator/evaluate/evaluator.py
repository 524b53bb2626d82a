"""The interfaces through which the search uses a compiler and a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol, runtime_checkable

from generator.kernels.geometry import Config
from generator.kernels.nvrtc import Compiled
from generator.kernels.variant import AnyVariant
from generator.problem import Problem
from generator.result import Result


class Pool(Protocol):
    """Compiles variants in the background; `generator.kernels.compile_pool` has the real one."""

    processes: int

    def submit(self, variant: AnyVariant) -> Future[Compiled]: ...

    def result(self, variant: AnyVariant, future: Future[Compiled]) -> Compiled: ...

    def code(self, variant: AnyVariant) -> str:
        """Digest of what `submit` compiles, without compiling: variants equal in it are the same
        machine code (`generator.kernels.code_digest`)."""
        ...


class Evaluator(Protocol):
    """Answers for compiled variants. A bad variant is a Result, never an exception."""

    @property
    def evidence(self) -> str:
        """`measured` or `predicted`."""
        ...

    def evaluate(
        self, problem: Problem, variant: AnyVariant, compiled: Compiled, best_us: float | None
    ) -> Result:
        """Check a variant's accuracy and determinism, and time it. best_us: µs of the best variant
        so far, with which a slow one may be given up early."""
        ...

    def finals(
        self, problem: Problem, entries: list[tuple[AnyVariant, Compiled]]
    ) -> Sequence[Result]:
        """Return interleaved times and the results of the full determinism checks, in the order of
        the entries."""
        ...


@runtime_checkable
class Shortlisting(Evaluator, Protocol):
    """An evaluator that can time many candidates side by side: that tells more than their trials,
    each of which had its own moment."""

    def shortlist(
        self,
        problem: Problem,
        entries: Sequence[tuple[AnyVariant, Compiled]],
        blocks: int | None = None,
    ) -> list[float]:
        """Ratios to the floor from so many blocks, by default enough to rank, without any check;
        nothing where no clean times can be had."""
        ...


@runtime_checkable
class Confirming(Evaluator, Protocol):
    """An evaluator with one more check, too slow for all finalists: the one that is to win gets it,
    and when it fails, the one that is to win then."""

    def confirm(self, problem: Problem, variant: AnyVariant, result: Result) -> Result:
        """The result of a finalist with what the check found."""
        ...


@runtime_checkable
class Preferring(Evaluator, Protocol):
    """An evaluator whose times are uncertain, and which knows what won elsewhere. tie: times this
    close, relative to the best, are equal."""

    @property
    def tie(self) -> float: ...

    def starts(self, problem: Problem) -> list[Config]:
        """Configs to begin with, most promising first; they need not be legal."""
        ...

    def agreement(self, problem: Problem, config: Config) -> float:
        """Return how much a config resembles what won elsewhere: of equal configs, the one with the
        highest agreement wins."""
        ...
