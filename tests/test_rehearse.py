"""Predicted winners are executed on the CPU before they may win."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from generator import rehearse
from generator.compile import Compiled, Resources, compile_variant
from generator.emulate import Check
from generator.problem import Problem
from generator.rehearse import RehearsingPredictor
from generator.runtime.plan import MAIN_KERNEL
from generator.space import load_space
from generator.target import find_target
from generator.variant import Variant, make_variant

PROBLEM = Problem.parse("4096x1024:bf16")
TARGET = find_target("gb200")
SPACE = load_space()


def finalists(count: int, seed: int = 3) -> list[tuple[Variant, Compiled]]:
    """Different variants that look alike to the model: equal resources."""
    rng = random.Random(seed)
    compiled = Compiled(
        TARGET.arch, "", b"", {MAIN_KERNEL: Resources(64, 0, 0, 0)}, "13.0", False, ""
    )
    fixed = {"strategy": "separate", "ctas_per_sm": 1, "min_blocks": 1}
    found: dict[str, Variant] = {}
    while len(found) < count:
        variant = make_variant(SPACE.sample(PROBLEM, TARGET, rng, fixed), PROBLEM)
        found[variant.id] = variant
    return [(variant, compiled) for variant in found.values()]


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], Check]], list[str]]:
    """Replaces the executor; returns the list of variants that it was asked about."""

    def install(answer: Callable[[str], Check]) -> list[str]:
        asked: list[str] = []

        def check(variant: Variant, problem: Problem, *, schedules: int) -> Check:
            asked.append(variant.id)
            return answer(variant.id)

        monkeypatch.setattr(rehearse, "check_variant", check)
        return asked

    return install


def best_of(results: list[rehearse.Result]) -> int:
    return min(
        (i for i, result in enumerate(results) if result.may_win),
        key=lambda i: results[i].ratio or 0.0,
    )


def test_whatever_may_be_chosen_was_executed(executor) -> None:  # type: ignore[no-untyped-def]
    asked = executor(lambda name: Check(name, 12, 1, 1e-3, 1e-3))
    entries = finalists(8)
    results = RehearsingPredictor(TARGET).finals(PROBLEM, entries)
    best = results[best_of(results)].ratio or 0.0
    tied = [i for i, r in enumerate(results) if r.may_win and (r.ratio or 0.0) <= best * 1.01]
    assert {entries[i][0].id for i in tied} == set(asked)
    assert all("host executor, 12 schedules" in results[i].checks for i in tied)
    assert all(results[i].determinism == "unverified" for i in tied)


def test_failing_variant_is_out_and_the_next_best_is_executed(executor) -> None:  # type: ignore[no-untyped-def]
    entries = finalists(8)
    predicted = rehearse.Predictor(TARGET).finals(PROBLEM, entries)
    fastest = entries[best_of(predicted)][0].id

    def answer(name: str) -> Check:
        problems = ("planted: dw[3] was never written",) if name == fastest else ()
        return Check(name, 12, 1, 1e-3, 1e-3, problems)

    asked = executor(answer)
    results = RehearsingPredictor(TARGET).finals(PROBLEM, entries)
    failed = results[[variant.id for variant, _ in entries].index(fastest)]
    assert failed.outcome == "wrong" and "never written" in failed.note
    winner = best_of(results)
    assert entries[winner][0].id != fastest
    assert entries[winner][0].id in asked


def test_without_a_compiler_the_check_is_reported_as_not_run(executor) -> None:  # type: ignore[no-untyped-def]
    executor(lambda name: Check(name, 0, note="no C++ compiler found"))
    results = RehearsingPredictor(TARGET).finals(PROBLEM, finalists(3))
    winner = results[best_of(results)]
    assert winner.checks == ()
    assert winner.note == "not executed: no C++ compiler found"


def test_a_variant_is_executed_once_for_all_numbers_of_rows(executor) -> None:  # type: ignore[no-untyped-def]
    asked = executor(lambda name: Check(name, 12, 1, 1e-3, 1e-3))
    predictor = RehearsingPredictor(TARGET)
    entries = finalists(2)
    for M in (4096, 8192, 16384):
        predictor.finals(Problem(M, 1024, "bf16", "bf16"), entries)
    assert len(asked) == len(set(asked))


def test_real_variant_passes_the_real_executor() -> None:
    rng = random.Random(0)
    variant = make_variant(SPACE.sample(PROBLEM, TARGET, rng, {"strategy": "last_cta"}), PROBLEM)
    compiled = compile_variant(variant, TARGET.arch)
    (result,) = RehearsingPredictor(TARGET, schedules=3).finals(PROBLEM, [(variant, compiled)])
    assert result.outcome == "ok", result.note
    assert result.checks == ("host executor, 3 schedules",)
