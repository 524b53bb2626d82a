"""Measures all forward kernels of one shape: there are so few that none has to be searched for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from generator.evaluate.gpu.evaluator import MeasuredEvaluator
from generator.kernels.forward import CompiledForward
from generator.problem import Problem
from generator.result import Result

SCREEN_ROUNDS = 7
FINALISTS = 6

Check = Callable[[Problem, Sequence[CompiledForward]], list[Result]]


def measure_forwards(
    evaluator: MeasuredEvaluator, problem: Problem, entries: Sequence[CompiledForward]
) -> list[Result]:
    """The results of all entries, which are in order of preference. Those that passed accuracy and
    20 runs, without and with a residual, have times if they were among the fastest in one block of
    all accurate ones (where that block stayed noisy: among the first). Raises NoisyError and what
    `Supervisor.call` raises."""
    with_residual = replace(problem, residual=problem.dtype)
    results = evaluator.check_accuracy(with_residual, entries)

    def checked(places: list[int], check: Check, shape: Problem) -> list[int]:
        """Those of `places` that pass a check, too."""
        found = check(shape, [entries[place] for place in places])
        for place, result in zip(places, found, strict=True):
            results[place] = result
        return [place for place in places if results[place].outcome == "ok"]

    places = [place for place, result in enumerate(results) if result.outcome == "ok"]
    places = checked(places, evaluator.check_accuracy, problem)
    if places:
        screened = [entries[place] for place in places]
        ratios = evaluator.shortlist(problem, screened, blocks=1, rounds=SCREEN_ROUNDS)
        if ratios:
            places = [place for _, place in sorted(zip(ratios, places, strict=True))]
        places = checked(places[:FINALISTS], evaluator.check_determinism, with_residual)
        checked(places, evaluator.finals, problem)
    return results
