"""Every knob of a kernel counts: another value is another kernel, or another launch of the same."""

from __future__ import annotations

import random
from collections.abc import Iterator

from generator.kernels.code_digest import compiler_input
from generator.kernels.variant import Variant, make_variant
from generator.problem import Problem
from generator.target import find_target
from tests.support.samples import SPACE

TARGET = find_target("h200")
SHAPES = ("4096x1024:bf16", "512x8192:fp32", "65536x128:fp16:fp32", "4096x1000:bf16")
DRAWN = 30


def changes(problem: Problem, rng: random.Random) -> Iterator[tuple[str, Variant, Variant]]:
    """Yield knobs, each with two variants that differ in it alone."""
    for _ in range(DRAWN):
        config = SPACE.sample(problem, TARGET, rng)
        for knob in SPACE.knobs:
            for value in knob.values:
                other = SPACE.normalize({**config, knob.name: value}, problem, TARGET)
                differ = [name for name in config if config[name] != other[name]]
                if differ == [knob.name] and SPACE.reject(other, problem, TARGET) is None:
                    yield knob.name, make_variant(config, problem), make_variant(other, problem)


def compiled_from(variant: Variant) -> tuple[str, int]:
    source, register_cap = compiler_input(variant, comments=False)
    return source.replace(variant.id, ""), register_cap


def test_another_value_of_a_knob_is_another_kernel() -> None:
    seen = set[str]()
    for shape in SHAPES:
        for name, one, other in changes(Problem.parse(shape), random.Random(shape)):
            seen.add(name)
            same = compiled_from(one) == compiled_from(other)
            assert same == (one.source_config == other.source_config), (one.config, other.config)
    # What else is legal depends on `vector_bytes`.
    assert seen == {knob.name for knob in SPACE.knobs} - {"vector_bytes"}
