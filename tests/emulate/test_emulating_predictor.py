"""Predicted winners are executed on the CPU before they may win."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from generator.emulate import Check
from generator.emulate import evaluator as emulate
from generator.emulate.build import HostError
from generator.emulate.evaluator import EmulatingPredictor
from generator.errors import NormforgeError
from generator.evaluate.predict.correction import Correction
from generator.evaluate.predict.fitted import load_fitted
from generator.kernels.cubin_cache import compile_variant
from generator.kernels.forward import ForwardVariant
from generator.kernels.geometry import Config
from generator.kernels.nvrtc import Compiled
from generator.kernels.ptxas import Resources
from generator.kernels.variant import Variant, make_variant
from generator.problem import Problem
from generator.result import Result
from generator.search.choose_winner import Choice, choose, preference_of
from generator.search.finals import hold_round
from generator.space.legal_configs import LegalConfigs
from generator.space.load import load_space
from generator.target import find_target
from normforge.spec import MAIN_KERNEL
from tests.support.forward import of_kind

PROBLEM = Problem.parse("4096x1024:bf16")
TARGET = find_target("gb200")
SPACE = load_space()
PHYSICAL = replace(load_fitted(), correction=Correction((), 0.0, ()))
"""Sees no hints."""


def finalists(count: int) -> list[tuple[Variant, Compiled]]:
    """Different variants that are equally fast to the model: equal resources, other hints."""
    rng = random.Random(3)
    compiled = Compiled(
        TARGET.arch, "", b"", {MAIN_KERNEL: Resources(64, 0, 0, 0)}, "13.0", False, ""
    )
    fixed = SPACE.sample(PROBLEM, TARGET, rng, {"strategy": "separate", "ctas_per_sm": 1})
    for free in ("load_hint", "store_hint", "min_blocks"):
        del fixed[free]
    found: dict[str, Variant] = {}
    while len(found) < count:
        variant = make_variant(SPACE.sample(PROBLEM, TARGET, rng, fixed), PROBLEM)
        found[variant.id] = variant
    return [(variant, compiled) for variant in found.values()]


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], Check]], list[str]]:
    """Replaces the emulator; returns the list of variants that it was asked about."""

    def install(answer: Callable[[str], Check]) -> list[str]:
        asked: list[str] = []

        def check(variant: Variant, problem: Problem, *, schedules: int) -> Check:
            asked.append(variant.id)
            return answer(variant.id)

        monkeypatch.setattr(emulate, "check_variant", check)
        return asked

    return install


def held(
    entries: list[tuple[Variant, Compiled]], incumbent: Config | None = None
) -> tuple[list[Result], Choice | None]:
    """The results of finals, and who wins."""
    rank = LegalConfigs(SPACE, PROBLEM, TARGET).rank
    predictor = EmulatingPredictor(TARGET, fitted=PHYSICAL)
    results = hold_round(predictor, PROBLEM, entries, rank, incumbent)
    pairs = [(v.config, result) for (v, _), result in zip(entries, results, strict=True)]
    return results, choose(pairs, rank, incumbent, preference_of(predictor, PROBLEM))


def test_the_winner_was_executed_and_nobody_else(emulator) -> None:  # type: ignore[no-untyped-def]
    asked = emulator(lambda name: Check(name, 12, 1, {"dx": 1e-3, "dw": 2e-3}))
    entries = finalists(8)
    results, choice = held(entries)
    assert choice is not None and len(choice.tied) == 8
    winner = results[choice.winner]
    assert asked == [entries[choice.winner][0].id]
    assert winner.checks == ("CPU emulator, 12 schedules",)
    assert winner.errors == {"dx": 1e-3, "dw": 2e-3}
    assert winner.determinism == "unverified"
    assert all(not r.checks for i, r in enumerate(results) if i != choice.winner)


def test_an_incumbent_that_is_to_stay_is_executed(emulator) -> None:  # type: ignore[no-untyped-def]
    entries = finalists(8)
    emulator(lambda name: Check(name, 12, 1, {"dx": 1e-3, "dw": 1e-3}))
    _, first = held(entries)
    assert first is not None
    other = entries[first.tied[-1]][0]
    asked = emulator(lambda name: Check(name, 12, 1, {"dx": 1e-3, "dw": 1e-3}))
    _, choice = held(entries, other.config)
    assert choice is not None and entries[choice.winner][0] is other
    assert asked == [other.id]


@pytest.mark.parametrize("failing", [3, 8])
def test_failing_variants_are_out_and_the_next_winner_is_executed(emulator, failing: int) -> None:  # type: ignore[no-untyped-def]
    entries = finalists(8)

    def answer(name: str) -> Check:
        problems = ("planted: dw[3] was never written",) if len(asked) <= failing else ()
        return Check(name, 12, 1, {"dx": 1e-3, "dw": 1e-3}, problems)

    asked = emulator(answer)
    results, choice = held(entries)
    failed = [result for result in results if result.outcome == "wrong"]
    assert len(failed) == failing
    assert all("never written" in result.note for result in failed)
    assert len(asked) == min(failing + 1, len(entries))
    assert (choice is None) == (failing == len(entries))
    if choice is not None:
        assert entries[choice.winner][0].id == asked[-1]


def test_machine_that_cannot_execute_decides_nothing(emulator) -> None:  # type: ignore[no-untyped-def]
    def full(name: str) -> Check:
        raise HostError("no space left on device")

    emulator(full)
    with pytest.raises(HostError, match="no space left"):
        held(finalists(3))


def test_source_that_the_compiler_refuses_is_out(emulator) -> None:  # type: ignore[no-untyped-def]
    def refuse(name: str) -> Check:
        raise NormforgeError("g++ refuses the source: error")

    emulator(refuse)
    results, choice = held(finalists(3))
    assert choice is None
    assert {(result.outcome, result.note) for result in results} == {
        ("wrong", "g++ refuses the source: error")
    }


def test_without_a_compiler_the_check_is_reported_as_not_run(emulator) -> None:  # type: ignore[no-untyped-def]
    emulator(lambda name: Check(name, 0, note="no C++ compiler found"))
    results, choice = held(finalists(3))
    assert choice is not None
    assert results[choice.winner].checks == ()
    assert results[choice.winner].note == "not executed: no C++ compiler found"


def test_a_variant_is_executed_once_for_all_numbers_of_rows(emulator) -> None:  # type: ignore[no-untyped-def]
    asked = emulator(lambda name: Check(name, 12, 1, {"dx": 1e-3, "dw": 1e-3}))
    predictor = EmulatingPredictor(TARGET)
    ((variant, compiled),) = finalists(1)
    for M in (4096, 8192, 16384):
        problem = Problem(M, 1024, "bf16", "bf16")
        (result,) = predictor.finals(problem, [(variant, compiled)])
        assert predictor.confirm(problem, variant, result).checks
    assert len(asked) == 1


def test_what_a_few_rows_have_shown_does_not_count_for_many(emulator) -> None:  # type: ignore[no-untyped-def]
    """Too few rows refill no stage; and a dependent launch runs other code paths."""
    asked = emulator(lambda name: Check(name, 12, 1, {"dx": 1e-3, "dw": 1e-3}))
    predictor = EmulatingPredictor(TARGET)
    ((variant, compiled),) = finalists(1)
    other = "dependent" if variant["overlap"] == "none" else "none"
    launched_otherwise = replace(variant, config={**variant.config, "overlap": other})
    assert launched_otherwise.id == variant.id
    for M, one in ((8, variant), (4096, variant), (4096, launched_otherwise)):
        problem = Problem(M, 1024, "bf16", "bf16")
        (result,) = predictor.finals(problem, [(one, compiled)])
        assert predictor.confirm(problem, one, result).checks
    assert len(asked) == 3


def test_a_forward_is_executed_again_where_more_rows_show_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def check(variant: ForwardVariant, problem: Problem) -> Check:
        asked.append(problem.M)
        return Check(variant.id, 3, 1, {"y": 1e-3})

    monkeypatch.setattr(emulate, "check_forward", check)
    predictor = EmulatingPredictor(TARGET)
    variant = of_kind("4096x1024:bf16")
    for M in (1, 4096, 16384):
        result = predictor.confirm(Problem(M, 1024, "bf16", "bf16"), variant, Result("ok", us=1.0))
        assert result.checks == ("CPU emulator, 3 schedules",)
    assert asked == [1, 4096]


def test_real_variant_passes_the_real_emulator() -> None:
    rng = random.Random(0)
    variant = make_variant(SPACE.sample(PROBLEM, TARGET, rng, {"strategy": "last_cta"}), PROBLEM)
    compiled = compile_variant(variant, TARGET.arch)
    predictor = EmulatingPredictor(TARGET, schedules=3)
    (predicted,) = predictor.finals(PROBLEM, [(variant, compiled)])
    result = predictor.confirm(PROBLEM, variant, predicted)
    assert result.outcome == "ok", result.note
    assert result.checks == ("CPU emulator, 3 schedules",)
