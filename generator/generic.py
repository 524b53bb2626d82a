"""The kernels of a package that take any shape: one safe config, never tuned.

`separate` with no overlap and plain or cp.async loads needs no residency, no barrier across CTAs
and no instruction newer than sm_80, so it runs wherever its code loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from generator.problem import ITEMSIZE, Problem
from generator.space import Space, load_space
from generator.target import Target
from generator.variant import Config, Variant, make_variant

DTYPES = tuple((dtype, weight) for dtype in ITEMSIZE for weight in dict.fromkeys((dtype, "fp32")))
"""Every pair of x's and the weight's dtype that the kernels know."""

MANY_ROWS = 1 << 20
"""Rows that fill any grid: the rules see a generic variant at its most demanding."""


@dataclass(frozen=True)
class _Layout:
    """CTAs for rows of up to `columns`. Eight columns in each thread fit the registers; sixteen do
    when x and dy wait in shared memory and are read twice."""

    columns: int
    threads_per_row: int
    rows_per_cta: int
    ctas_per_sm: int
    pipeline: str = "direct"


_LAYOUTS = (
    _Layout(1024, 128, 2, 2),
    _Layout(4096, 512, 1, 1),
    _Layout(8192, 1024, 1, 1),
    _Layout(16384, 1024, 1, 1, "async"),
)


def generic_variants(
    target: Target,
    dtypes: Sequence[tuple[str, str]] = DTYPES,
    space: Space | None = None,
) -> list[Variant]:
    """The generic variants of a package for `target`, of every layout that the rules of the space
    allow there: for rows of whole 16-byte vectors at aligned addresses, and for all others.

    dtypes: pairs of x's and the weight's dtype. A variant serves every M >= 1 and N up to its own.
    """
    space = space or load_space()
    found: list[Variant] = []
    for dtype, weight_dtype in dtypes:
        for layout in _LAYOUTS:
            problem = Problem(MANY_ROWS, layout.columns, dtype, weight_dtype)
            for vector_bytes in (16, problem.itemsize):
                config = _config(layout, vector_bytes)
                config = space.normalize(config, problem, target)
                if space.reject(config, problem, target, exact=False) is None:
                    found.append(make_variant(config, problem, exact=False))
    return found


def _config(layout: _Layout, vector_bytes: int) -> Config:
    return {
        "strategy": "separate",
        "overlap": "none",
        "slice_columns": 32,
        "sum_threads": 512,
        "cluster": 1,
        "pipeline": layout.pipeline,
        "stages": 2,
        "reload": "smem",
        "threads_per_row": layout.threads_per_row,
        "rows_per_cta": layout.rows_per_cta,
        "rows_in_flight": 1,
        "vector_bytes": vector_bytes,
        "weight_in": "smem",
        "ctas_per_sm": layout.ctas_per_sm,
        "grid": "full",
        "min_blocks": layout.ctas_per_sm,
        "register_cap": 0,
        "load_hint": "default",
        "store_hint": "default",
    }
