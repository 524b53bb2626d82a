"""benchmarks/untuned.py: what it draws, and what a row says of the kernels."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.untuned import draw, kernels, named
from generator.problem import Problem
from generator.runtime.api import Package

COMMITTED = Path(__file__).resolve().parent.parent / "generated" / "h200" / "rmsnorm_backward"


@pytest.fixture(scope="module")
def package() -> Package:
    return Package(COMMITTED)


def test_drawn_shapes_are_new_and_the_same_for_the_same_seed(package: Package) -> None:
    cases = draw(package, 20, 10, seed=3)
    assert [kind for kind, _ in cases] == ["M"] * 20 + ["N"] * 10
    assert cases == draw(package, 20, 10, seed=3) != draw(package, 20, 10, seed=4)
    tuned = {(t.M, t.N) for t in package.table.tuned if t.dtype == "bf16"}
    widths = {N for _, N in tuned}
    for kind, problem in cases:
        assert (problem.M, problem.N) not in tuned
        assert (problem.N in widths) == (kind == "M")
        assert 1000 <= problem.M <= 100_000 and problem.N <= 16384
        assert problem.M * problem.N <= 1 << 29


def test_given_shapes_say_what_of_them_is_unknown(package: Package) -> None:
    cases = named(package, "1205x3072:bf16,68240x3890:bf16")
    assert [(kind, str(p)) for kind, p in cases] == [
        ("M", "1205x3072:bf16"),
        ("N", "68240x3890:bf16"),
    ]


@pytest.mark.parametrize(("N", "how"), [(1024, "nearest"), (1000, "generic"), (20001, "none")])
def test_row_names_the_kernel_of_the_module_and_the_found_one(
    package: Package, N: int, how: str
) -> None:
    config = {"strategy": "separate", "threads_per_row": 64}
    winner: Any = SimpleNamespace(variant="separate_async2_n1000", config=config)
    row = kernels(Problem(4097, N, "bf16", "bf16"), winner, package)
    assert (row["shape"], row["how"]) == (f"4097x{N}:bf16", how)
    assert (row["tuned"], row["tuned_config"]) == (winner.variant, config)
    if how == "none":
        assert row["ours_kernel"] is None
    else:
        assert (COMMITTED / "kernels" / f"{row['ours_kernel']}.cubin").exists()
