"""The kernels of a package that take any shape.

`separate` with plain or cp.async loads needs no counters, no barrier across CTAs and no instruction
newer than sm_80 (but a programmatic launch where there is one), so it runs wherever its code loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from generator.kernels.geometry import Config
from generator.kernels.nvrtc import Compiled
from generator.kernels.resource_gate import refuse
from generator.kernels.variant import Variant, make_variant
from generator.problem import ITEMSIZE, Problem
from generator.result import Result
from generator.space.load import load_space
from generator.space.space import Space
from generator.target import Target

DTYPES = tuple((dtype, weight) for dtype in ITEMSIZE for weight in dict.fromkeys((dtype, "fp32")))
"""Every pair of x's and the weight's dtype that the kernels know."""

MANY_ROWS = 1 << 20
"""Rows that fill any grid: the rules see a fallback variant at its most demanding."""


@dataclass(frozen=True)
class _Layout:
    """CTAs for rows of up to `columns`."""

    columns: int
    pipeline: str
    stages: int
    threads_per_row: int
    rows_per_cta: int
    ctas_per_sm: int
    rows_in_flight: int = 1
    reload: str = "none"
    weight_in: str = "registers"
    load_hint: str = "evict_last"


_WIDE = (
    _Layout(256, "direct", 1, 32, 8, 3, rows_in_flight=2),
    _Layout(512, "direct", 1, 32, 8, 2, rows_in_flight=2, weight_in="smem"),
    _Layout(768, "async", 3, 32, 8, 1, rows_in_flight=2),
    _Layout(1024, "async", 3, 128, 4, 1, rows_in_flight=2, reload="smem"),
    _Layout(1536, "async", 3, 96, 8, 1, reload="smem"),
    _Layout(2048, "async", 2, 128, 4, 1),
    _Layout(3072, "async", 2, 128, 4, 1),
    _Layout(4096, "async", 2, 256, 2, 1),
    _Layout(6144, "async", 2, 256, 2, 1),
    _Layout(8192, "async", 2, 384, 1, 1),
    _Layout(12288, "async", 2, 384, 1, 1),
    _Layout(16384, "async", 2, 512, 1, 1, reload="smem"),
)
"""For rows of whole 16-byte vectors. Like those below the best of up to 50 layouts each (ten of
those drawn at random and by the predictor, the others from brackets nearby and from larger draws
before kernels added in blocks), at two N of the bracket and two M in bf16 on one H200:
benchmarks/layouts.py, results/layouts_h200.json.
A bracket goes from one column more than the one before it up to its own."""

_EIGHT = (
    _Layout(256, "async", 2, 32, 8, 3, rows_in_flight=2, reload="smem"),
    _Layout(512, "async", 2, 32, 8, 2),
    _Layout(768, "async", 2, 64, 8, 1, rows_in_flight=2),
    _Layout(1024, "async", 2, 128, 4, 1, rows_in_flight=2),
    _Layout(1536, "async", 2, 128, 4, 1, rows_in_flight=2),
    _Layout(2048, "async", 2, 128, 1, 3, rows_in_flight=2),
    _Layout(3072, "async", 2, 128, 4, 1, weight_in="smem"),
    _Layout(4096, "async", 4, 192, 1, 2),
    _Layout(6144, "async", 3, 192, 1, 2, reload="smem"),
    _Layout(8192, "async", 2, 256, 1, 1),
    _Layout(12288, "async", 2, 384, 1, 1),
    _Layout(16384, "async", 2, 512, 1, 1, reload="smem"),
)
"""For rows of whole 8-byte vectors."""

_FOUR = (
    _Layout(128, "direct", 1, 32, 8, 4, rows_in_flight=2),
    _Layout(256, "async", 3, 32, 8, 2, rows_in_flight=2),
    _Layout(384, "async", 3, 32, 8, 2, reload="smem"),
    _Layout(512, "async", 3, 32, 8, 2, reload="smem"),
    _Layout(640, "async", 3, 64, 4, 2, weight_in="smem"),
    _Layout(768, "async", 6, 32, 8, 1, weight_in="smem"),
    _Layout(1024, "async", 4, 64, 4, 1, reload="smem"),
    _Layout(1280, "async", 4, 128, 1, 4, reload="smem"),
    _Layout(1536, "async", 4, 64, 4, 1, reload="smem"),
    _Layout(2048, "async", 2, 64, 2, 2),
    _Layout(2560, "async", 4, 192, 2, 1),
    _Layout(3072, "async", 3, 128, 1, 3),
    _Layout(4096, "async", 2, 192, 2, 1),
    _Layout(5120, "async", 2, 192, 2, 1),
    _Layout(6144, "async", 3, 256, 1, 1),
    _Layout(8192, "async", 3, 256, 1, 1),
    _Layout(12288, "async", 2, 512, 1, 1, weight_in="smem"),
    _Layout(16384, "async", 2, 1024, 1, 1, reload="smem", weight_in="smem", load_hint="default"),
)
"""For rows of whole 4-byte words, in fp32 for any row."""

_TWO = (
    _Layout(128, "direct", 1, 64, 4, 3, rows_in_flight=4),
    _Layout(256, "direct", 1, 32, 8, 2, load_hint="default"),
    _Layout(384, "direct", 1, 32, 8, 2, load_hint="default"),
    _Layout(512, "direct", 1, 32, 8, 2, load_hint="default"),
    _Layout(640, "direct", 1, 32, 8, 2, load_hint="default"),
    _Layout(768, "direct", 1, 64, 8, 1, load_hint="default"),
    _Layout(1024, "direct", 1, 64, 2, 4, load_hint="default"),
    _Layout(1280, "direct", 1, 64, 8, 1, load_hint="default"),
    _Layout(1536, "direct", 1, 128, 4, 1, load_hint="default"),
    _Layout(2048, "direct", 1, 128, 4, 1, load_hint="default"),
    _Layout(2560, "direct", 1, 128, 4, 1, load_hint="default"),
    _Layout(3072, "direct", 1, 128, 1, 4, weight_in="smem", load_hint="default"),
    _Layout(4096, "direct", 1, 256, 1, 2, load_hint="default"),
    _Layout(5120, "direct", 1, 256, 2, 1, weight_in="smem", load_hint="default"),
    _Layout(6144, "direct", 1, 192, 2, 1, weight_in="smem"),
    _Layout(8192, "direct", 1, 384, 1, 1),
    _Layout(12288, "direct", 1, 384, 1, 1, weight_in="smem"),
)
"""For an odd number of 2-byte elements, which cp.async cannot copy, and for fp32 where there is no
room for the stages of those above."""

_MODEST = (
    _Layout(256, "direct", 1, 32, 8, 3),
    _Layout(512, "direct", 1, 64, 8, 1),
    _Layout(1024, "direct", 1, 64, 8, 1),
    _Layout(2048, "direct", 1, 128, 4, 1),
    _Layout(3072, "direct", 1, 256, 2, 1, rows_in_flight=2),
    _Layout(4096, "direct", 1, 256, 2, 1, weight_in="smem"),
)
"""Where a GPU has no room for one of those: the best of what needs little, by the predictor."""

_ROOMY = (
    _Layout(768, "async", 2, 64, 2, 3, rows_in_flight=2),
    _Layout(1536, "async", 3, 256, 1, 4),
    _Layout(3072, "async", 3, 256, 2, 1),
    _Layout(6144, "async", 3, 512, 1, 1, weight_in="smem"),
    _Layout(8192, "async", 3, 512, 1, 1, weight_in="smem"),
    _Layout(12288, "direct", 1, 512, 1, 1, weight_in="smem"),
)
"""For rows of fp32 in whole 16-byte vectors, where those of bf16 leave no room for the rows."""

_PLAIN = (
    _Layout(1024, "direct", 1, 128, 2, 2, weight_in="smem"),
    _Layout(4096, "direct", 1, 512, 1, 1, weight_in="smem"),
    _Layout(8192, "direct", 1, 1024, 1, 1, weight_in="smem"),
    _Layout(16384, "async", 2, 1024, 1, 1, reload="smem", weight_in="smem"),
    _Layout(16384, "direct", 1, 512, 1, 1, weight_in="smem"),
)
"""Where a GPU or a dtype has no room for those above: few registers, and shared memory only where
nothing else holds the rows."""

_FP32_WEIGHT = {
    2: {
        16: (
            _Layout(6144, "async", 2, 256, 2, 1),
            _Layout(8192, "async", 2, 256, 1, 1),
            _Layout(12288, "async", 2, 384, 1, 1),
            _Layout(16384, "async", 2, 512, 1, 1, reload="smem"),
        ),
        4: (
            _Layout(6144, "async", 3, 256, 1, 1),
            _Layout(8192, "async", 3, 256, 1, 1, load_hint="default"),
            _Layout(12288, "async", 2, 512, 1, 1, weight_in="smem"),
        ),
        2: (
            _Layout(6144, "direct", 1, 256, 2, 1, weight_in="smem", load_hint="default"),
            _Layout(8192, "direct", 1, 384, 1, 1, load_hint="default"),
            _Layout(12288, "direct", 1, 512, 1, 1, weight_in="smem", load_hint="default"),
        ),
    },
    4: {
        16: (
            _Layout(1024, "async", 2, 128, 4, 1),
            _Layout(1536, "direct", 1, 128, 4, 1, rows_in_flight=2, weight_in="smem"),
            _Layout(3072, "direct", 1, 192, 2, 1, rows_in_flight=2),
            _Layout(4096, "async", 2, 128, 2, 1, reload="smem", weight_in="smem"),
            _Layout(6144, "direct", 1, 512, 1, 1, rows_in_flight=2),
            _Layout(8192, "direct", 1, 512, 1, 1, weight_in="smem", load_hint="default"),
        ),
        8: (
            _Layout(1024, "async", 4, 192, 4, 1, reload="smem"),
            _Layout(1536, "async", 2, 64, 4, 1, weight_in="smem"),
            _Layout(3072, "async", 3, 256, 2, 1),
            _Layout(4096, "async", 2, 256, 1, 1),
            _Layout(6144, "async", 2, 256, 1, 1),
            _Layout(8192, "async", 2, 256, 1, 1),
        ),
        4: (
            _Layout(1024, "direct", 1, 64, 8, 1, load_hint="default"),
            _Layout(1536, "direct", 1, 128, 2, 2, weight_in="smem", load_hint="default"),
            _Layout(4096, "direct", 1, 256, 1, 2, load_hint="default"),
            _Layout(6144, "direct", 1, 256, 1, 2, weight_in="smem", load_hint="default"),
            _Layout(8192, "direct", 1, 512, 1, 1, load_hint="default"),
        ),
    },
}
"""For an fp32 weight where those above had no room, by the bytes of an element and of a vector,
measured like them on one H200 (results/layouts_bf16_fp32_h200.json, layouts_fp32_h200.json)."""


def fallback_variants(
    target: Target,
    dtypes: Sequence[tuple[str, str]] = DTYPES,
    space: Space | None = None,
) -> list[Variant]:
    """The fallback variants of a package for `target`, of every layout that the rules of the space
    allow there: for vectors of 16, 8 and 4 bytes and of one element, each for rows of whole vectors
    at aligned addresses. Last, and so for want of others, each comes once more for any rows
    up to its own: it asks about every vector, with registers to spare.

    dtypes: pairs of x's and the weight's dtype. A variant serves every M >= 1 and N from its least
    up to its own. `compile_fallbacks` keeps one for each length of rows.
    """
    space = space or load_space()
    found: list[Variant] = []
    for dtype, weight_dtype in dtypes:
        for vector_bytes, layouts in _layouts(ITEMSIZE[dtype], weight_dtype).items():
            legal = []
            for layout, in_blocks in layouts:
                problem = Problem(MANY_ROWS, layout.columns, dtype, weight_dtype)
                config = legal_config(
                    layout, vector_bytes, problem, target, space, in_blocks=in_blocks
                )
                if config is not None:
                    legal.append(make_variant(config, problem, exact=False, in_blocks=in_blocks))
            ends = sorted({variant.N for variant in legal})
            least = {end: before + 1 for before, end in zip([0, *ends], ends, strict=False)}
            found += [replace(variant, least=least[variant.N]) for variant in legal]
            found += [variant for variant in legal if least[variant.N] > 1]
    return found


def legal_config(
    layout: _Layout,
    vector_bytes: int,
    problem: Problem,
    target: Target,
    space: Space,
    *,
    in_blocks: bool = True,
) -> Config | None:
    """The config of a layout, None where the rules of the space forbid it."""
    config = space.normalize(_config(layout, vector_bytes), problem, target)
    rejected = space.reject(config, problem, target, exact=False, in_blocks=in_blocks)
    return None if rejected else config


def _layouts(itemsize: int, weight_dtype: str) -> dict[int, list[tuple[_Layout, bool]]]:
    """Layouts, best first, by the bytes of a vector, for elements of `itemsize` bytes; and whether
    they add rows in blocks, which takes registers and shared memory: a layout without blocks comes
    right behind itself with them, before layouts that are slower."""
    rest = _MODEST + _PLAIN
    known = {16: _WIDE + _PLAIN, 8: _EIGHT + rest, 4: _FOUR + rest, 2: _TWO + rest}
    if itemsize == 4:
        known = {16: _WIDE + _ROOMY + _PLAIN, 8: _EIGHT + rest, 4: _FOUR + _TWO + rest}
    found = {}
    for size, layouts in known.items():
        own = _FP32_WEIGHT[itemsize].get(size, ()) if weight_dtype == "fp32" else ()
        both = [(layout, how) for layout in layouts for how in (True, False)]
        found[size] = list(dict.fromkeys([(layout, True) for layout in own] + both))
    return found


def first_choices(variants: Iterable[Variant]) -> list[Variant]:
    """Of several that take the same rows the first."""
    found: dict[tuple[object, ...], Variant] = {}
    for variant in variants:
        found.setdefault(same_rows(variant), variant)
    return list(found.values())


def compile_fallbacks(
    target: Target,
    compile: Callable[[list[Variant]], Iterable[Compiled]],
    dtypes: Sequence[tuple[str, str]] = DTYPES,
) -> list[tuple[Variant, Compiled]]:
    """The fallback kernels of a package: of several variants that take the same rows the first that
    may run on the target, and where none may, the next longer one takes their rows as well.

    compile: gives the results of variants, in their order. It is asked for first choices, and then
    for those that take the place of what may not run.
    """
    variants = fallback_variants(target, dtypes)
    found: dict[tuple[object, ...], tuple[Variant, Compiled]] = {}

    def ask(asked: list[Variant]) -> None:
        for variant, compiled in zip(asked, compile(asked), strict=True):
            if refuse_fallback(variant, compiled, target) is None:
                found[same_rows(variant)] = (variant, compiled)

    waiting = variants
    while waiting:
        asked = first_choices(waiting)
        ask(asked)
        tried = {variant.id for variant in asked}
        waiting = [v for v in waiting if v.id not in tried and same_rows(v) not in found]
    for any_rows in (False, True):
        ask(_over_gaps([variant for variant, _ in found.values()], any_rows))
    return [found[rows] for rows in dict.fromkeys(map(same_rows, variants)) if rows in found]


def _over_gaps(variants: list[Variant], any_rows: bool) -> list[Variant]:
    """Those that rows come before which no kernel of their vectors takes, made to take these rows
    (or any up to theirs) as well."""
    found = []
    ends: dict[tuple[object, ...], int] = {}
    for variant in sorted(variants, key=lambda variant: variant.N):
        _, *kind = same_rows(variant)
        end = ends.get(tuple(kind), 0)
        if variant.least > end + 1:
            found.append(replace(variant, least=1 if any_rows else end + 1))
        ends[tuple(kind)] = variant.N
    return found


def refuse_fallback(variant: Variant, compiled: Compiled, target: Target) -> Result | None:
    """The result of a fallback variant that must not run on the target, None for one that may."""
    many_rows = Problem(MANY_ROWS, variant.N, variant.dtype, variant.weight_dtype)
    return refuse(variant, compiled, many_rows, target)


def takes_rows(variant: Variant, problem: Problem) -> bool:
    """Whether a fallback variant of the problem's dtypes serves its rows, dense and aligned."""
    whole = problem.N * problem.itemsize % variant["vector_bytes"] == 0
    return variant.least <= problem.N <= variant.N and whole


def same_rows(variant: Variant) -> tuple[object, ...]:
    """What two fallback variants have in common that take the same rows."""
    return (variant.N, variant["vector_bytes"], variant.dtype, variant.weight_dtype)


def _config(layout: _Layout, vector_bytes: int) -> Config:
    return {
        "strategy": "separate",
        "overlap": "dependent",
        "slice_columns": 32,
        "sum_threads": 512,
        "cluster": 1,
        "pipeline": layout.pipeline,
        "stages": layout.stages,
        "reload": layout.reload,
        "threads_per_row": layout.threads_per_row,
        "rows_per_cta": layout.rows_per_cta,
        "rows_in_flight": layout.rows_in_flight,
        "vector_bytes": vector_bytes,
        "weight_in": layout.weight_in,
        "ctas_per_sm": layout.ctas_per_sm,
        "grid": "full",
        "min_blocks": layout.ctas_per_sm,
        "register_cap": 0,
        "load_hint": layout.load_hint,
        "store_hint": "default",
    }
