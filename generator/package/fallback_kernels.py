"""The kernels of a package that take any shape.

`separate` with plain or cp.async loads needs no counters, no barrier across CTAs and no instruction
newer than sm_80 (but a programmatic launch where there is one), so it runs wherever its code loads.
Operations without sums over the rows need no strategy, and have as many CTAs as the rows need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from generator.disk import read_yaml
from generator.errors import NormforgeError, one_line
from generator.kernels.geometry import Config
from generator.kernels.nvrtc import Compiled
from generator.kernels.resource_gate import refuse
from generator.kernels.variant import Variant, make_variant
from generator.paths import SEARCH_SPACES
from generator.problem import ITEMSIZE, RMSNORM_BACKWARD, Problem, sums_of
from generator.result import Result
from generator.space.load import load_space_once, space_file
from generator.space.space import Space
from generator.target import Target

DTYPES = tuple((dtype, weight) for dtype in ITEMSIZE for weight in dict.fromkeys((dtype, "fp32")))
"""Every pair of x's and the weight's dtype that the kernels know."""

LAYOUTS_FILE = SEARCH_SPACES / "fallback_kernels.yaml"
FALLBACKS = ("none", "common", "all")
"""The choices of fallback kernels that a run makes. common: for the dtypes of its shapes, rows of
whole 16-byte vectors, which every width of a model is (a multiple of 8 elements). all: every dtype
and vector, hundreds of kernels, most of them for odd widths and unaligned rows."""
COMMON_VECTOR_BYTES = 16
MANY_ROWS = 1 << 20
"""Rows that fill any grid: the rules see a fallback variant at its most demanding."""


@dataclass(frozen=True)
class Layout:
    """The layout of the CTAs for rows of up to `columns`."""

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
    cluster: int = 1
    spare_sms: int = 0


@dataclass(frozen=True)
class _Layouts:
    """The content of LAYOUTS_FILE. groups: by their names there; fp32_weight: for an fp32 weight,
    by the bytes of an element and of a vector."""

    groups: Mapping[str, tuple[Layout, ...]]
    fp32_weight: Mapping[int, Mapping[int, tuple[Layout, ...]]]


@cache
def load_layouts() -> _Layouts:
    """Read the layouts. Raises NormforgeError for a damaged file."""
    content = read_yaml(LAYOUTS_FILE, "the fallback layouts ")
    try:
        return _Layouts(
            {name: _read(entries) for name, entries in content["layouts"].items()},
            {
                itemsize: {size: _read(entries) for size, entries in sizes.items()}
                for itemsize, sizes in content["fp32_weight"].items()
            },
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise NormforgeError(
            f"cannot read the fallback layouts {LAYOUTS_FILE}: {one_line(error)}"
        ) from error


def _read(entries: Sequence[Mapping[str, Any]]) -> tuple[Layout, ...]:
    return tuple(Layout(**entry) for entry in entries)


def fallback_variants(
    target: Target,
    dtypes: Sequence[tuple[str, str]] = DTYPES,
    operation: str = RMSNORM_BACKWARD,
) -> list[Variant]:
    """The fallback variants for `target`, of every layout that the rules of the space allow there:
    for vectors of 16, 8 and 4 bytes and of one element, each for rows of whole vectors at aligned
    addresses. Last, as a last resort, each comes again for any rows up to its own: it checks every
    vector, with registers to spare.

    dtypes: pairs of x's and the weight's dtype. A variant serves every M >= 1 and N from its least
    up to its own. `compile_fallbacks` keeps one for each row length.
    """
    space, sums = load_space_once(space_file(operation)), sums_of(operation).column_sums
    found: list[Variant] = []
    for dtype, weight_dtype in dtypes:
        for vector_bytes, layouts in _layouts(ITEMSIZE[dtype], weight_dtype).items():
            legal = []
            for layout, in_blocks in layouts:
                if (layout.cluster > 1 and sums != 1) or not (sums or in_blocks):
                    continue  # no CTAs share such rows, and nothing is added in blocks
                shape = (MANY_ROWS, layout.columns, dtype, weight_dtype)
                problem = Problem(*shape, operation=operation)
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
    layout: Layout,
    vector_bytes: int,
    problem: Problem,
    target: Target,
    space: Space,
    *,
    in_blocks: bool = True,
) -> Config | None:
    """The config of a layout, None where the rules of the space forbid it. One with clusters is
    judged by its longest row, because a search tries no clusters for rows of unknown length. On a
    part of a GPU, its spare SMs may be most of them: then it is left out."""
    if 4 * layout.spare_sms > target.sms:
        return None
    config = space.normalize(_config(layout, vector_bytes, space), problem, target)
    exact = layout.cluster > 1
    rejected = space.reject(config, problem, target, exact=exact, in_blocks=in_blocks)
    return None if rejected else config


def _layouts(itemsize: int, weight_dtype: str) -> dict[int, list[tuple[Layout, bool]]]:
    """Layouts, best first, by the bytes of a vector, for elements of `itemsize` bytes; and whether
    they add rows in blocks, which takes registers and shared memory: a layout without blocks comes
    right behind itself with them, before layouts that are slower."""
    layouts = load_layouts()
    group = layouts.groups
    rest = group["modest"] + group["plain"]
    known = {
        16: group["wide"] + group["plain"] + group["long"],
        8: group["eight"] + rest,
        4: group["four"] + rest,
        2: group["two"] + rest,
    }
    if itemsize == 4:
        known[16] = group["wide"] + group["roomy"] + group["plain"] + group["long"]
        known[4] = group["four"] + group["two"] + rest
        del known[2]
    found = {}
    for size, own_layouts in known.items():
        own = layouts.fp32_weight[itemsize].get(size, ()) if weight_dtype == "fp32" else ()
        both = [(layout, how) for layout in own_layouts for how in (True, False)]
        found[size] = list(dict.fromkeys([(layout, True) for layout in own] + both))
    return found


def first_choices(variants: Iterable[Variant]) -> list[Variant]:
    """Return the first of all variants that take the same rows."""
    found: dict[tuple[object, ...], Variant] = {}
    for variant in variants:
        found.setdefault(rows_key(variant), variant)
    return list(found.values())


def fallbacks_to_compile(
    which: str, target: Target, problems: Iterable[Problem], operation: str = RMSNORM_BACKWARD
) -> list[Variant]:
    """The variants for `compile_fallbacks` of one of FALLBACKS and the problems of a run."""
    variants = fallback_variants(target, fallback_dtypes(which, problems), operation)
    if which == "common":
        return [v for v in variants if v["vector_bytes"] == COMMON_VECTOR_BYTES]
    return variants


def fallback_dtypes(which: str, problems: Iterable[Problem]) -> list[tuple[str, str]]:
    """The pairs of x's and the weight's dtype that one of FALLBACKS has kernels for."""
    if which == "none":
        return []
    own = {(problem.dtype, problem.weight_dtype) for problem in problems}
    return [pair for pair in DTYPES if which == "all" or pair in own]


def compile_fallbacks(
    target: Target,
    compile: Callable[[list[Variant]], Iterable[Compiled]],
    variants: Sequence[Variant] | None = None,
) -> list[tuple[Variant, Compiled]]:
    """The fallback kernels of a package: of the variants that take the same rows the first that may
    run on the target; where none may, the next longer one takes these rows as well. variants: to
    choose from, default `fallback_variants(target)`. compile: gives results in the order of its
    variants; called with first choices, then with replacements of what may not run."""
    variants = fallback_variants(target) if variants is None else variants
    kernels: dict[tuple[object, ...], tuple[Variant, Compiled]] = {}

    def compile_all(candidates: list[Variant]) -> None:
        for variant, compiled in zip(candidates, compile(candidates), strict=True):
            if refuse_fallback(variant, compiled, target) is None:
                kernels[rows_key(variant)] = (variant, compiled)

    remaining = list(variants)
    while remaining:
        candidates = first_choices(remaining)
        compile_all(candidates)
        tried = {variant.id for variant in candidates}
        remaining = [v for v in remaining if v.id not in tried and rows_key(v) not in kernels]
    for any_rows in (False, True):
        compile_all(_fill_gaps([variant for variant, _ in kernels.values()], any_rows))
    return [kernels[rows] for rows in dict.fromkeys(map(rows_key, variants)) if rows in kernels]


def _fill_gaps(variants: list[Variant], any_rows: bool) -> list[Variant]:
    """Return the variants that leave a gap of row lengths below them, made to take these lengths
    (or any up to theirs) as well."""
    found = []
    ends: dict[tuple[object, ...], int] = {}
    for variant in sorted(variants, key=lambda variant: variant.N):
        _, *kind = rows_key(variant)
        end = ends.get(tuple(kind), 0)
        if variant.least > end + 1:
            found.append(replace(variant, least=1 if any_rows else end + 1))
        ends[tuple(kind)] = variant.N
    return found


def refuse_fallback(variant: Variant, compiled: Compiled, target: Target) -> Result | None:
    """The result of a fallback variant that must not run on the target, None for one that may."""
    shape = (MANY_ROWS, variant.N, variant.dtype, variant.weight_dtype)
    many_rows = Problem(*shape, operation=variant.operation)
    return refuse(variant, compiled, many_rows, target)


def serves(variant: Variant, problem: Problem) -> bool:
    """Return True if a fallback variant of the problem's dtypes serves its rows, dense and
    aligned."""
    whole = problem.N * problem.itemsize % variant["vector_bytes"] == 0
    return variant.least <= problem.N <= variant.N and whole


def rows_key(variant: Variant) -> tuple[object, ...]:
    """Return a key that is equal for fallback variants that take the same rows."""
    return (variant.N, variant["vector_bytes"], variant.dtype, variant.weight_dtype)


def _config(layout: Layout, vector_bytes: int, space: Space) -> Config:
    choices = {knob.name: knob.choices for knob in space.knobs}
    alone = "none" in choices["strategy"]
    reload = layout.reload if layout.reload in choices["reload"] else "none"
    return {
        "strategy": "none" if alone else "separate",
        "overlap": "dependent",
        "slice_columns": 32,
        "sum_threads": 512,
        "grid": "rows" if alone else "full",
        "register_cap": 0,
        "store_hint": "default",
        "vector_bytes": vector_bytes,
        "min_blocks": layout.ctas_per_sm,
        **{knob: value for knob, value in asdict(layout).items() if knob != "columns"},
        "reload": reload,
    }
