"""The comparison of GPU and emulator, bit for bit: what is drawn, and the emulator's side of it."""

from __future__ import annotations

import pytest

from benchmarks.bit_exact import emulate_case
from benchmarks.bit_exact_cases import REDUCTIONS, draw_case
from generator.emulate import find_compiler
from generator.kernels.strategies import STRATEGIES
from generator.target import Target

LAYERNORM = "layernorm_backward"


def test_cases_go_through_all_strategies_and_the_fallback_kernels(target: Target) -> None:
    cases = [draw_case(index, 1, target) for index in range(len(REDUCTIONS))]
    kinds = [case.variant["strategy"] for case in cases if case.variant.exact]
    assert kinds == [strategy.name for strategy in STRATEGIES]
    assert not cases[-1].variant.exact


def test_layernorm_has_all_strategies_and_fallback_kernels(target: Target) -> None:
    kinds = len(STRATEGIES) + 1
    cases = [draw_case(index, 1, target, LAYERNORM) for index in range(2 * kinds)]
    assert {case.variant.operation for case in cases} == {LAYERNORM}
    for some in (cases[:kinds], cases[kinds:]):
        names = [case.variant["strategy"] for case in some[:-1]]
        assert names == [strategy.name for strategy in STRATEGIES]
        assert [case.variant.exact for case in some] == [*(True for _ in names), False]


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.slow
def test_the_emulator_gives_both_sums_for_both_sets_of_inputs(target: Target) -> None:
    made = emulate_case(1, 1, target, LAYERNORM)
    assert made.failure == ""
    assert made.cubin
    N = made.case.problem.N
    assert [found["dw"].shape for found in made.results] == [(2 * N,)] * 2
    assert all(inputs.mean is not None for inputs in made.case.inputs())
