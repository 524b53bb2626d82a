"""The space of a forward: what its variants cover, and how they are told apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from generator.kernels.render import render_forward
from generator.problem import Problem
from generator.space.forward_space import forward_variants, preference
from generator.target import Target, find_target
from tests.support.forward import H200, of_kind
from tests.support.listed_forwards import listed
from tests.support.samples import WIDTHS, problems, targets


@settings(max_examples=80)
@given(problems(), targets())
def test_every_shape_has_variants_that_cover_its_rows(problem: Problem, target: Target) -> None:
    variants = forward_variants(problem, target)
    assert variants
    assert len({v.id + str(v.ctas_per_sm) for v in variants}) == len(variants)
    for v in variants:
        assert v.threads % 32 == 0
        assert v.threads <= 1024
        assert problem.N * problem.itemsize % v.vector_bytes == 0
        assert v.columns * v.cluster == problem.N
        assert v.columns % v.elements == 0
        assert v.cluster == 1 or (target.has_bulk_copy and v.rows_per_cta == 1)
        if v.form == "registers":
            assert v.vectors * v.threads_per_row * v.elements >= v.columns
            assert v.vectors * v.rows_in_flight <= 8


@pytest.mark.parametrize("gpu", ["a100", "h200", "gb200"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_space_allows_the_forwards_that_loops_list(gpu: str, dtype: str) -> None:
    target = find_target(gpu)
    few = [*range(1, 34), 40, 48, 72, 96, 104, 120, 136, 144, 160, 192, 320, 640]
    for N in (*few, 1280, 1792, 2560, 3584, 7168, 10240, 13824, 18432, 53248, 131072, *WIDTHS):
        problem = Problem(4096, N, dtype, dtype)
        found = forward_variants(problem, target)
        wanted = set(listed(problem, target))
        assert set(found) == wanted, N
        assert len(found) == len(wanted), "one is there twice"


def test_variants_differ_in_id_exactly_when_their_sources_differ() -> None:
    variants = forward_variants(Problem.parse("4096x4096:bf16"), H200)
    sources: dict[str, set[str]] = {}
    for v in variants:
        sources.setdefault(v.id, set()).add(render_forward(v))
    assert all(len(texts) == 1 for texts in sources.values())
    assert len(set().union(*sources.values())) == len(sources)


def test_grid_gives_every_row_to_a_cta_and_walkers_no_more_than_they_are() -> None:
    spec = of_kind("4096x256:bf16", walks=False).spec(132)
    rows = spec.rows_per_cta * spec.rows_in_flight
    for M in (1, rows, rows + 1, 10**9 + 7):
        assert spec.grid(M) * rows >= M > (spec.grid(M) - 1) * rows
    walker = replace(spec, ctas_per_sm=3)
    assert walker.grid(10**9) == 3 * 132
    assert walker.grid(1) == 1
    assert replace(walker, cluster=4).grid(10**9) == 3 * 132


def test_two_ctas_for_each_sm_are_enough_and_fewer_are_not() -> None:
    for v in forward_variants(Problem.parse("4096x4096:bf16"), H200)[:40]:
        rows = v.rows_per_cta * v.rows_in_flight
        for ctas, lacks in ((2 * H200.sms, False), (2 * H200.sms - 1, True)):
            problem = Problem(ctas * rows, 4096, "bf16", "bf16")
            assert preference(v, problem, H200)[3] is lacks
