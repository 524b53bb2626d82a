"""Predicted winners are run on the CPU before they may win: few rows, many schedules."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from generator.emulate import Check, check_variant
from generator.emulate.build import HostError
from generator.emulate.check import reduced_problem, small_launch
from generator.errors import NormforgeError
from generator.evaluate.predict.evaluator import Predictor
from generator.kernels.variant import Variant
from generator.problem import Problem
from generator.result import Result

SCHEDULES = 12


@dataclass(frozen=True)
class EmulatingPredictor(Predictor):
    """The evaluator where the target is absent: times are predicted, and the would-be winner is
    executed by `generator.emulate`, on few rows. One that fails is out, and the next one is
    executed.

    The emulator runs the rendered source, so what passes is accurate, has the same bits under every
    schedule tried, and leaves its counters at zero. It is no GPU: determinism stays `unverified`,
    and the check's name says what was done. Executing all finalists that are tied took 40 % of a
    search.
    """

    schedules: int = SCHEDULES
    _checks: dict[tuple[object, ...], Check] = field(
        default_factory=dict, init=False, compare=False
    )

    def confirm(self, problem: Problem, variant: Variant, result: Result) -> Result:
        """The emulator's verdict. Raises HostError when there is none because this machine fails:
        what a full disk decides would be kept for good."""
        # Most M are reduced to the same few rows, and so are executed once.
        few = reduced_problem(variant, problem)
        executed = (variant.id, few, *small_launch(variant, few.M))
        check = self._checks.get(executed)
        if check is None:
            try:
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
