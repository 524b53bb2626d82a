"""The kernels of a package that take any shape: one safe config, never tuned.

`separate` with no overlap and plain loads needs no residency, no barrier across CTAs and no
instruction newer than sm_80, so it runs wherever its code loads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from generator.problem import ITEMSIZE, Problem
from generator.space import Space, load_space
from generator.target import Target
from generator.variant import Config, Variant, make_variant

DTYPES = tuple((dtype, weight) for dtype in ITEMSIZE for weight in dict.fromkeys((dtype, "fp32")))
"""Every pair of x's and the weight's dtype that the kernels know."""

_MANY_ROWS = 1 << 20


@dataclass(frozen=True)
class _Layout:
    """CTAs for rows of up to `row_bytes`: at most two 16-byte vectors in a thread."""

    row_bytes: int
    threads_per_row: int
    rows_per_cta: int
    ctas_per_sm: int


_LAYOUTS = (_Layout(2048, 128, 2, 4), _Layout(8192, 256, 1, 2), _Layout(32768, 1024, 1, 1))


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
            for problem, vector_bytes in _widths(layout, dtype, weight_dtype):
                for config in _configs(layout, vector_bytes):
                    config = space.normalize(config, problem, target)
                    if space.reject(config, problem, target, exact=False) is None:
                        found.append(make_variant(config, problem, exact=False))
                        break
    return found


def _widths(layout: _Layout, dtype: str, weight_dtype: str) -> Iterator[tuple[Problem, int]]:
    """The longest row and the vector of the two kinds. An odd length is what makes single elements
    the widest vector that the rules know for the second kind."""
    columns = layout.row_bytes // ITEMSIZE[dtype]
    yield Problem(_MANY_ROWS, columns, dtype, weight_dtype), 16
    yield Problem(_MANY_ROWS, columns - 1, dtype, weight_dtype), ITEMSIZE[dtype]


def _configs(layout: _Layout, vector_bytes: int) -> Iterator[Config]:
    """The config, with the weight in shared memory as the second choice: in the widest rows there
    is not always a register for it."""
    for weight_in in ("registers", "smem"):
        yield {
            "strategy": "separate",
            "overlap": "none",
            "slice_columns": 32,
            "cluster": 1,
            "pipeline": "direct",
            "threads_per_row": layout.threads_per_row,
            "rows_per_cta": layout.rows_per_cta,
            "rows_in_flight": 1,
            "vector_bytes": vector_bytes,
            "weight_in": weight_in,
            "ctas_per_sm": layout.ctas_per_sm,
            "grid": "full",
            "min_blocks": layout.ctas_per_sm,
            "register_cap": 0,
            "load_hint": "default",
            "store_hint": "default",
        }
