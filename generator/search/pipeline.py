"""The trials under way: the next one is chosen while one is measured and others are compiled.

Choosing a trial takes the surrogate longer than measuring it takes a GPU. The order of the results
stays that of the proposals.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import optuna

from generator.evaluate.evaluator import Pool
from generator.kernels.nvrtc import Compiled
from generator.kernels.variant import AnyVariant

R = TypeVar("R")


@dataclass(frozen=True)
class Proposal:
    """A trial that nobody has compiled yet, and why it was chosen."""

    trial: optuna.Trial
    origin: str
    variant: AnyVariant


class Pipeline:
    """Proposals that wait for their results; a context manager that cancels those left at its end.

    `propose` answers None when there is nothing more to try. It runs in a second thread while
    `measure` does, but never while the caller of `results` keeps a result: what it reads does not
    change under it.
    """

    def __init__(self, pool: Pool, propose: Callable[[], Proposal | None]) -> None:
        self._pool, self._propose = pool, propose
        self._pending: deque[tuple[Proposal, Future[Compiled]]] = deque()
        self._beside = ThreadPoolExecutor(1, "proposals")

    def __len__(self) -> int:
        return len(self._pending)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *exception: object) -> None:
        while self._pending:
            self._pending.pop()[1].cancel()
        self._beside.shutdown(cancel_futures=True)

    def results(
        self, measure: Callable[[AnyVariant, Compiled], R]
    ) -> Iterator[tuple[Proposal, Compiled, R]]:
        """Yield proposals with their machine code and what `measure` says of it, until there is
        nothing more to try. The pool and `measure` are called in the caller's thread alone:
        evaluators are not made for several threads."""
        while True:
            while len(self) <= self._pool.processes and self._submit(self._propose()):
                pass
            if not self._pending:
                return
            following = self._beside.submit(self._propose)
            first, future = self._pending[0]  # stays there, and counts, until it is measured
            compiled = self._pool.result(first.variant, future)
            result = measure(first.variant, compiled)
            self._submit(following.result())
            self._pending.popleft()
            yield first, compiled, result

    def _submit(self, proposal: Proposal | None) -> bool:
        """Have a proposal compiled; False where there is none."""
        if proposal is not None:
            self._pending.append((proposal, self._pool.submit(proposal.variant)))
        return proposal is not None
