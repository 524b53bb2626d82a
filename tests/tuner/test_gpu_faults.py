"""Neighbours, full memory and killed workers, on a GPU. Their consequences are tested without a GPU
in tuner/test_faults.py and evaluate/test_noise.py; here the real worker has to notice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from generator.errors import ProblemError
from generator.evaluate.gpu.evaluator import MeasuredEvaluator
from generator.evaluate.gpu.supervisor import Supervisor
from generator.kernels.cubin_cache import compile_variant
from generator.problem import Problem
from generator.result import Result
from generator.target import Target
from tests.support.samples import plain_variant

pytestmark = pytest.mark.gpu

SMALL, LARGE = Problem.parse("4096x1024:bf16"), Problem.parse("65536x8192:bf16")
BUSY = """
import torch
memory = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
print("here", flush=True)
while True:
    memory.fill_(1)
    torch.cuda.synchronize()
"""
HOARD = """
import time, torch
free, _ = torch.cuda.mem_get_info()
memory = torch.empty(free - (1 << 30), dtype=torch.uint8, device="cuda")
print("here", flush=True)
time.sleep(600)
"""


@contextmanager
def neighbour(source: str) -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"here\n"
            yield
        finally:
            process.kill()


def patient() -> Supervisor:
    return Supervisor(0, 60.0, sleep=lambda seconds: None)


@pytest.fixture(scope="module", autouse=True)
def alone() -> None:
    """Tests of other workers would be such neighbours, and would find no memory."""
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        pytest.skip("needs the GPU for itself: run this file without -n")


@pytest.fixture(scope="module")
def evaluator(here: Target) -> Iterator[MeasuredEvaluator]:
    with MeasuredEvaluator(here, patient()) as evaluator:
        yield evaluator


def evaluate(evaluator: MeasuredEvaluator, problem: Problem = SMALL) -> Result:
    threads = max(128, problem.N // 16)
    variant = plain_variant(
        problem, evaluator.target, threads_per_row=threads, rows_per_cta=1 if threads > 128 else 2
    )
    compiled = compile_variant(variant, evaluator.target.arch)
    return evaluator.evaluate(problem, variant, compiled, None)


def test_undisturbed_trials_are_clean_and_say_how_far_their_times_scatter(
    evaluator: MeasuredEvaluator,
) -> None:
    for problem in (SMALL, LARGE):
        results = [evaluate(evaluator, problem) for _ in range(20)]
        assert not any(result.noisy for result in results), [result.note for result in results]
        print(problem, sorted(result.extra["spread"] for result in results))


def test_busy_neighbour_is_noticed_or_does_no_harm(evaluator: MeasuredEvaluator) -> None:
    quiet = evaluate(evaluator, LARGE)
    with neighbour(BUSY):
        loud = evaluate(evaluator, LARGE)
        seen = evaluator.monitor.causes(evaluator._supervisor.pids)
    assert quiet.ratio is not None
    assert loud.noisy or loud.ratio == pytest.approx(quiet.ratio, rel=0.03), loud
    if not evaluator.monitor.reason:
        assert any("other process" in cause for cause in seen), seen
    assert not evaluate(evaluator, LARGE).noisy


def test_worker_killed_from_outside_costs_no_trial(evaluator: MeasuredEvaluator) -> None:
    assert evaluate(evaluator).outcome == "ok"
    lost = evaluator.lost
    os.kill(evaluator._supervisor.pids[0], signal.SIGKILL)
    assert evaluate(evaluator).outcome == "ok"
    assert evaluator.lost == lost + 1


def test_memory_that_others_hold_ends_the_problem_and_is_used_when_it_is_free(
    here: Target,
) -> None:
    with MeasuredEvaluator(here, patient()) as evaluator:
        assert evaluate(evaluator).outcome == "ok"
        with neighbour(HOARD), pytest.raises(ProblemError, match="memory"):
            evaluate(evaluator, LARGE)
        assert evaluate(evaluator, LARGE).outcome == "ok"
