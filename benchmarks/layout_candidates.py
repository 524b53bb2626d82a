"""Chooses the layouts that benchmarks/layouts.py times for a vector size and a bracket of N."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from itertools import product
from statistics import geometric_mean
from typing import Any

from generator.evaluate.predict.evaluator import predict_us
from generator.kernels.ptxas import Resources
from generator.kernels.variant import Variant, make_variant
from generator.package.fallback_kernels import MANY_ROWS, Layout, legal_config
from generator.problem import ITEMSIZE, Problem
from generator.space.expressions import DERIVED
from generator.space.load import load_space
from generator.space.space import Space
from generator.target import Target

COARSE = (256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
FINE = tuple(sorted((*COARSE, 128, 384, 640, 1280, 2560, 5120)))
LONG = (20480, 24576, 32768, 40960, 49152, 65536)
"""Lengths of rows that clusters share."""
BRACKETS = {2: FINE, 4: FINE, 8: COARSE, 16: (*COARSE, *LONG)}
"""The brackets of each vector size. Kernels of narrow vectors are busy with instructions, of which
there are as many as columns in the bracket."""
COLUMNS = (*FINE, *LONG)
CHOICES = (
    (("direct", 1), *product(("async",), (2, 3, 4, 6))),
    (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024),
    (1, 2, 4, 8),
    (1, 2, 3, 4, 6, 8),
    (1, 2, 4),
    ("none", "smem"),
    ("registers", "smem"),
    ("evict_last",),
)
"""The choices that are drawn for a layout, in the order of its fields."""
LONG_CHOICES = (
    tuple(product(("async",), (2, 3, 4, 5, 6))),
    (128, 192, 256, 384, 512, 768),
    (1,),
    (1, 2),
    (1,),
    ("none", "smem"),
    ("registers", "smem"),
    ("evict_last",),
    (2, 4, 8, 16),
    (0, 12, 20, 28),
)
"""The choices that are drawn for LONG brackets."""
SIZES = tuple(BRACKETS)
TIMED_ROWS = (4096, 65536)
TIMED_ELEMENTS = 1 << 28
"""The most elements of a timed problem: the widest rows are fewer."""


@dataclass(frozen=True)
class Group:
    """Rows of `least` to `columns` elements, in vectors of `vector_bytes`. weight_dtype: x's where
    it is empty."""

    vector_bytes: int
    columns: int
    dtype: str
    weight_dtype: str = ""

    @property
    def least(self) -> int:
        return max((n for n in BRACKETS[self.vector_bytes] if n < self.columns), default=0) + 1

    def problems(self, rows: Iterable[int] = TIMED_ROWS) -> list[Problem]:
        """Return problems at two N of the bracket, an eighth from its ends, that no wider vector
        divides."""
        low = self.least - 1 or self.columns // 2
        edge = (self.columns - low) // 8
        unit = self.vector_bytes // ITEMSIZE[self.dtype]
        widths = [(n // unit | 1) * unit for n in (low + edge, self.columns - edge)]
        shapes = [(min(M, TIMED_ELEMENTS // N), N) for M in rows for N in widths]
        return [self._problem(M, N) for M, N in shapes]

    @property
    def widest(self) -> Problem:
        """The problem for which the rules of the space are asked."""
        return self._problem(MANY_ROWS, self.columns)

    def _problem(self, M: int, N: int) -> Problem:
        return Problem(M, N, self.dtype, self.weight_dtype or self.dtype)


def legal(
    group: Group, layout: Layout, target: Target, space: Space, in_blocks: bool = True
) -> Variant | None:
    """The variant of a layout, None where the rules of the space forbid it."""
    problem, vector_bytes = group.widest, group.vector_bytes
    config = legal_config(layout, vector_bytes, problem, target, space, in_blocks=in_blocks)
    if config is None:
        return None
    return make_variant(config, problem, exact=False, least=group.least, in_blocks=in_blocks)


def known(group: Group, ours: Iterable[Variant], target: Target) -> list[Variant]:
    """Return the variants that the fallback kernels have for the group, then those of brackets up
    to twice as wide or half as wide; each with either hint for its loads."""
    same = [v for v in ours if v["vector_bytes"] == group.vector_bytes]
    same.sort(key=lambda v: abs(v.N - group.columns))
    near = [v for v in same if group.columns <= 2 * v.N <= 4 * group.columns]
    layouts = [
        (replace(layout_of(variant), columns=group.columns, load_hint=hint), variant.in_blocks)
        for variant in near
        for hint in ("default", "evict_last")
    ]
    space = load_space()
    found = [legal(group, layout, target, space, how) for layout, how in dict.fromkeys(layouts)]
    return [variant for variant in found if variant]


def draw(group: Group, target: Target, count: int, seed: int) -> list[Variant]:
    """Draw at most `count` legal layouts, the same for the same seed; those that the model predicts
    to be fastest come first."""
    space, problem = load_space(), group.widest
    long = group.columns in LONG
    choices: list[Any] = list(product(*(LONG_CHOICES if long else CHOICES)))
    random.Random(f"{seed} {group}").shuffle(choices)
    found: dict[str, tuple[float, Variant]] = {}
    for pipeline, *rest in choices:
        variant = legal(group, Layout(group.columns, *pipeline, *rest), target, space)
        if variant is None:
            continue
        registers = DERIVED["register_budget"].value(variant, problem, target)
        if fits(variant, registers) and variant.id not in found:
            estimate = Resources(registers, 0, 0, 0, 0)
            times = [predict_us(variant, estimate, p, target).us for p in group.problems()]
            found[variant.id] = (geometric_mean(times), variant)
        if len(found) == 4 * count:
            break
    best = sorted(found, key=lambda name: found[name][0])[: count // 2]
    return [found[name][1] for name in dict.fromkeys([*best, *found])][:count]


def fits(variant: Variant, registers: int) -> bool:
    """Return True if a variant will probably compile without spills and no thread idles much. The
    registers allowed are what 300 compiles for sm_90a needed beside the estimate of the rules."""
    rows = variant["rows_in_flight"] if variant["reload"] == "none" else 0
    more = 2 * (variant["vector_bytes"] // 4 + rows) * variant.vectors
    idle = variant["threads_per_row"] > 32 and variant.idle_columns * 3 > variant.columns
    return not idle and variant.register_estimate + more <= registers + 4


def layout_of(variant: Variant) -> Layout:
    """Return the layout that the fallback kernels would have for the variant."""
    return Layout(variant.N, *(variant[field.name] for field in fields(Layout)[1:]))
