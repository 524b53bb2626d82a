"""The emulator's outcomes become verdicts about a variant; no program runs."""

from __future__ import annotations

from typing import Any

import pytest

from generator.emulate import check as check_module
from generator.emulate.check import check_source, small_launch
from generator.emulate.run import Outcome, Runs
from generator.operations.rmsnorm_backward import make_reference
from generator.problem import Problem
from generator.target import find_target
from tests.support.samples import REDUCTION, plain_variant

PROBLEM = Problem.parse("13x1024:fp32")


@pytest.mark.parametrize(("reduction", "claims"), [("separate", True), ("atomic", False)])
def test_different_results_refute_a_claim(
    monkeypatch: pytest.MonkeyPatch, reduction: str, claims: bool
) -> None:
    """One that claims nothing may have as many as it likes."""
    variant = plain_variant(PROBLEM, find_target("h200"), **REDUCTION[reduction])
    spec, launch = small_launch(variant, PROBLEM.M)

    def two_results(*arguments: Any, **options: Any) -> Runs:
        inputs, schedules = arguments[3:5]
        reference = make_reference(PROBLEM, inputs)
        dx = reference.outputs["dx"].float()
        outcomes = [Outcome(s, {"dx": i % 2, "dw": 0}) for i, s in enumerate(schedules)]
        return Runs(outcomes, {"dx": [dx, dx], "dw": [reference.outputs["dw"].float()]})

    monkeypatch.setattr(check_module, "run_schedules", two_results)
    check = check_source("", spec, launch, PROBLEM, schedules=6)
    assert check.distinct_results == 2
    assert any("2 different results" in problem for problem in check.problems) is claims
