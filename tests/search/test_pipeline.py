"""The trials under way: when the next one is chosen, in which order they end, in which thread."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from itertools import islice

import optuna
import pytest
from optuna.storages import BaseStorage

from generator.errors import NormforgeError
from generator.kernels.nvrtc import Compiled
from generator.kernels.variant import AnyVariant, Variant, make_variant
from generator.search.budget import Budget
from generator.search.pipeline import Pipeline, Proposal
from tests.support.patience import patience
from tests.support.searches import records, search
from tests.support.synthetic import LEGAL, PROBLEM, FakeEvaluator, FakePool


def proposals(number: int) -> list[Proposal]:
    study = optuna.create_study()
    variants = [make_variant(config, PROBLEM) for config in LEGAL.first(number)]
    return [Proposal(study.ask(), str(place), v) for place, v in enumerate(variants)]


class ThreadPool(FakePool):
    """Keeps the threads that call it, and the compilations that were cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[threading.Thread] = set()
        self.futures: list[Future[Compiled]] = []

    def submit(self, variant: Variant) -> Future[Compiled]:
        self.threads.add(threading.current_thread())
        super().submit(variant)
        self.futures.append(Future())
        return self.futures[-1]

    def result(self, variant: Variant, future: Future[Compiled]) -> Compiled:
        self.threads.add(threading.current_thread())
        return self._compile(variant)


def test_the_next_trial_is_chosen_while_one_is_measured() -> None:
    """One that is measured waits for the choice, which ends before the result is told."""
    queue, caller = proposals(6), threading.current_thread()
    chosen = threading.Event()

    def propose() -> Proposal | None:
        if threading.current_thread() is not caller:
            chosen.set()
        return queue.pop(0) if queue else None

    def measure(variant: AnyVariant, compiled: Compiled) -> bool:
        in_time = chosen.wait(patience(10))
        chosen.clear()
        return in_time

    with Pipeline(FakePool(), propose) as pipeline:
        finished = [(p.origin, result) for p, _, result in pipeline.results(measure)]
    assert finished == [(str(place), True) for place in range(6)]


def test_processes_start_in_the_callers_thread_alone() -> None:
    """Evaluators need not be safe to use from several threads."""
    queue, pool, measured_in = proposals(5), ThreadPool(), set()
    chosen_in = set()

    def propose() -> Proposal | None:
        chosen_in.add(threading.current_thread())
        return queue.pop(0) if queue else None

    def measure(variant: AnyVariant, compiled: Compiled) -> None:
        measured_in.add(threading.current_thread())

    with Pipeline(pool, propose) as pipeline:
        assert len(list(pipeline.results(measure))) == 5
    assert pool.threads == measured_in == {threading.current_thread()}
    assert len(chosen_in) == 2


def test_what_is_left_at_the_end_is_cancelled() -> None:
    queue, pool = proposals(8), ThreadPool()
    with Pipeline(pool, lambda: queue.pop(0)) as pipeline:
        list(islice(pipeline.results(lambda variant, compiled: None), 2))
        under_way = len(pipeline)
    assert under_way == pool.processes + 1
    assert len(pipeline) == 0
    assert all(future.cancelled() for future in pool.futures[2:])
    assert not any(future.cancelled() for future in pool.futures[:2])


def test_an_error_while_a_trial_is_chosen_ends_the_search() -> None:
    queue = proposals(4)

    def propose() -> Proposal:
        if not queue:
            raise NormforgeError("nothing to draw from")
        return queue.pop(0)

    with Pipeline(FakePool(), propose) as pipeline, pytest.raises(NormforgeError, match="to draw"):
        list(pipeline.results(lambda variant, compiled: None))


@pytest.mark.usefixtures("quick_proposals")
@pytest.mark.parametrize("trials", [1, 2, 3, 9])
def test_a_trial_that_is_measured_counts_in_the_budget(storage: BaseStorage, trials: int) -> None:
    evaluator = FakeEvaluator()
    search(storage, evaluator, budget=Budget(trials=trials, sweep_limit=0))
    assert len(records(storage)) == len(evaluator.evaluated) == trials
