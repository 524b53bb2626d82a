"""The cases of benchmarks/bit_exact.py: variants, each with a problem, a layout and inputs."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from generator.emulate import Layout
from generator.emulate.check import CPU
from generator.kernels.geometry import Config
from generator.kernels.strategies import STRATEGIES, is_deterministic
from generator.kernels.variant import Variant, make_variant
from generator.operations import OPERATIONS, operation_of
from generator.package.fallback_kernels import fallback_variants, first_choices, serves
from generator.problem import RMSNORM_BACKWARD, Problem
from generator.space.load import load_space, space_file
from generator.target import Target

REDUCTIONS: tuple[Config | None, ...] = (
    *({"strategy": strategy.name, "order": strategy.order} for strategy in STRATEGIES),
    None,
)
"""The reductions, and None: a kernel for any N, of an operation that has some."""
DTYPES = (("bf16",) * 2, ("fp16",) * 2, ("fp32",) * 2, ("bf16", "fp32"), ("fp16", "fp32"))
WIDTHS = (
    1,
    6,
    33,
    64,
    77,
    128,
    129,
    256,
    333,
    512,
    1000,
    1001,
    1024,
    1536,
    2048,
    2050,
    3072,
    4096,
    4104,
    5120,
    8192,
    12288,
    16384,
)
MOST_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Case:
    """One variant with everything that its run depends on."""

    index: int
    problem: Problem
    variant: Variant
    participants: int
    layout: Layout

    def inputs(self) -> list[Any]:
        operation = operation_of(self.problem)
        plain = operation.make_inputs(self.problem, CPU, seed=self.index)
        return [plain, operation.make_cancelling(self.problem, plain, seed=self.index + 1)]


def draw_case(index: int, seed: int, target: Target, operation: str = RMSNORM_BACKWARD) -> Case:
    """Draw case `index`: reduction kinds and dtypes in turn, the rest at random."""
    rng = random.Random(f"{seed} {index}")
    reductions = REDUCTIONS if OPERATIONS[operation].fallbacks else REDUCTIONS[:-1]
    reduction = reductions[index % len(reductions)]
    dtype, weight_dtype = DTYPES[index // len(reductions) % len(DTYPES)]
    while True:
        N = rng.choice(WIDTHS)
        M = rng.randint(1, max(1, min(700, MOST_ELEMENTS // N)))
        problem = Problem(M, N, dtype, weight_dtype, operation=operation)
        if reduction is None:
            variant = draw_fallback(problem, target, rng)
        else:
            variant = draw_variant(problem, reduction, target, rng)
        if variant is not None:
            participants = 2 if variant.determinism == "none" else rng.randint(1, 20)
            return Case(index, problem, variant, participants, draw_layout(variant, rng))


def draw_fallback(problem: Problem, target: Target, rng: random.Random) -> Variant | None:
    """Draw one of the kernels that packages have for any N up to their own; None where none serves
    the problem."""
    fallbacks = fallbacks_of(problem.dtype, problem.weight_dtype, target, problem.operation)
    kernels = [variant for variant in fallbacks if serves(variant, problem)]
    return rng.choice(kernels) if kernels else None


@cache
def fallbacks_of(dtype: str, weight_dtype: str, target: Target, operation: str) -> list[Variant]:
    return first_choices(fallback_variants(target, [(dtype, weight_dtype)], operation))


def draw_variant(
    problem: Problem, reduction: Config, target: Target, rng: random.Random
) -> Variant | None:
    """A variant that reduces dw as `reduction` says. Further knobs are fixed at random; those that
    the rules of the space reject are dropped, the last one first."""
    # Configs are legal for many rows; that they also serve few is part of the test.
    tuned = replace(problem, M=65536)
    free = not is_deterministic(reduction)
    extras: list[tuple[str, int | str]] = [
        ("pipeline", rng.choice(("bulk", "direct", "async"))),
        ("cluster", rng.choice((1, 2, 8) if free else (1, 2, 4, 8))),
        ("reload", rng.choice(("smem", "none"))),
    ]
    if problem.N * problem.itemsize <= 1024:
        extras.append(("threads_per_row", rng.choice((8, 16, 32))))
    space = load_space(space_file(problem.operation))
    for count in range(len(extras), -1, -1):
        fixed = {**reduction, **dict(extras[:count])}
        config = next(space.legal(tuned, target, rng=rng, fixed=fixed), None)
        if config is not None and not (free and config["cluster"] == 4):
            return make_variant(config, problem)
    return None


def draw_layout(variant: Variant, rng: random.Random) -> Layout:
    """Draw dense rows, or strides and bases that are multiples of what the variant needs and no
    more."""
    if rng.random() < 0.5:
        return Layout()
    aligned = 16 if variant["pipeline"] == "bulk" else variant["vector_bytes"]
    unit = aligned // variant.itemsize
    return Layout((unit, 3 * unit, 2 * unit), aligned)
