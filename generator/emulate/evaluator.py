"""Predicted winners are run on the CPU before they may win: few rows, many schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from generator.emulate import Check, check_variant
from generator.emulate.build import HostError
from generator.emulate.check import reduced_problem, small_launch
from generator.emulate.forward import check_forward, few_rows
from generator.errors import NormforgeError
from generator.evaluate.predict.evaluator import Predictor
from generator.evaluate.predict.model import floor_us
from generator.kernels.forward import ForwardVariant
from generator.kernels.geometry import Config
from generator.kernels.nvrtc import Compiled
from generator.kernels.variant import AnyVariant
from generator.problem import FORWARDS, Problem
from generator.result import Result
from generator.space.forward_space import forward_variants
from generator.target import Target

SCHEDULES = 12


@dataclass(frozen=True)
class EmulatingPredictor(Predictor):
    """The evaluator where the target is absent: times are predicted, and the would-be winner is
    executed by `generator.emulate`, on few rows. One that fails is out, and the next one is
    executed.

    The emulator runs the rendered source, so what passes is accurate, has the same bits under every
    schedule tried, and leaves its counters at zero. It is no GPU: determinism stays `unverified`,
    and the check's name says what was done. Executing all finalists that are tied took 40 % of a
    search. No model knows forwards of RMSNorm: each counts as fast as the floor, and those that
    come early in `forward_variants` are preferred.
    """

    schedules: int = SCHEDULES
    _checks: dict[tuple[object, ...], Check] = field(
        default_factory=dict, init=False, compare=False
    )

    def evaluate(
        self, problem: Problem, variant: AnyVariant, compiled: Compiled, best_us: float | None
    ) -> Result:
        if isinstance(variant, ForwardVariant):
            us = floor_us(problem, self.target, self.model)
            return Result("ok", us=us, floor_us=us, ratio=1.0)
        return super().evaluate(problem, variant, compiled, best_us)

    def finals(
        self, problem: Problem, entries: Sequence[tuple[AnyVariant, Compiled]]
    ) -> list[Result]:
        return [self.evaluate(problem, variant, compiled, None) for variant, compiled in entries]

    def starts(self, problem: Problem) -> list[Config]:
        if problem.operation in FORWARDS:
            return _in_order(problem, self.target)
        return super().starts(problem)

    def agreement(self, problem: Problem, config: Config) -> float:
        if problem.operation in FORWARDS:
            return -_in_order(problem, self.target).index(dict(config))
        return super().agreement(problem, config)

    def confirm(self, problem: Problem, variant: AnyVariant, result: Result) -> Result:
        """The emulator's verdict. Raises HostError when there is none because this machine fails:
        what a full disk decides would be kept for good."""
        # Most M are reduced to the same few rows, and so are executed once.
        executed: tuple[object, ...]
        if isinstance(variant, ForwardVariant):
            executed = (variant.id, few_rows(variant, problem))
        else:
            few = reduced_problem(variant, problem)
            executed = (variant.id, few, *small_launch(variant, few.M))
        check = self._checks.get(executed)
        if check is None:
            try:
                if isinstance(variant, ForwardVariant):
                    check = check_forward(variant, problem)
                else:
                    check = check_variant(variant, problem, schedules=self.schedules)
            except HostError:
                raise
            except NormforgeError as error:
                check = Check(variant.id, 0, problems=(str(error),))
            self._checks[executed] = check
        if check.problems:
            outcome = "nondeterministic" if check.distinct_results > 1 else "wrong"
            return replace(result, outcome=outcome, note=check.problems[0])
        if not check.passed:
            return replace(result, note=f"not executed: {check.note}")
        return replace(
            result,
            checks=(*result.checks, f"CPU emulator, {check.schedules} schedules"),
            errors=dict(check.errors),
        )


@lru_cache
def _in_order(problem: Problem, target: Target) -> list[Config]:
    return [variant.config for variant in forward_variants(problem, target)]
