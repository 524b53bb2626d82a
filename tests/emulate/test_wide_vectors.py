"""Vectors of 32 bytes, which only Blackwell has: compiled for it, and run on the CPU."""

from __future__ import annotations

import pytest

from generator.emulate import check_variant, find_compiler
from generator.kernels.nvrtc import compile_source
from generator.kernels.render import render
from generator.problem import Problem
from generator.target import find_target
from tests.support.samples import DETERMINISTIC, REDUCTION, SPACE, sample_variant

GB200 = find_target("gb200")


@pytest.mark.parametrize(
    ("gpu", "pipeline", "legal"),
    [
        ("gb200", "direct", True),
        ("gb200", "async", False),
        ("gb200", "bulk", False),
        ("h200", "direct", False),
    ],
)
def test_the_space_has_vectors_of_32_bytes_in_direct_loads_on_blackwell(
    gpu: str, pipeline: str, legal: bool
) -> None:
    """Shared memory and cp.async know at most 16 bytes."""
    fixed: dict[str, int | str] = {"vector_bytes": 32, "pipeline": pipeline}
    configs = SPACE.legal(Problem.parse("4096x4096:bf16"), find_target(gpu), fixed=fixed)
    assert (next(configs, None) is not None) is legal


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", ["4096x1024:bf16", "4096x512:fp32", "4096x256:fp16:fp32"])
@pytest.mark.parametrize("reduction", DETERMINISTIC)
def test_vectors_of_32_bytes_compile_and_run_right(reduction: str, shape: str) -> None:
    problem = Problem.parse(shape)
    fixed: dict[str, int | str] = {"vector_bytes": 32, "pipeline": "direct"}
    variant = sample_variant(problem, GB200, 7, **REDUCTION[reduction], **fixed)
    assert not compile_source(render(variant), GB200.arch).error
    check = check_variant(variant, problem, schedules=6)
    assert check.passed, check
    assert check.distinct_results == 1
