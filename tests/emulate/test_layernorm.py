"""LayerNorm's backward in the emulator: every strategy, against float64, under many schedules."""

from __future__ import annotations

import pytest

from generator.emulate import check_variant, find_compiler
from generator.problem import Problem
from generator.target import Target
from tests.support.samples import sample_variant

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

SHAPE = "layernorm_backward:42x1024:bf16"
SEED = 2026


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("shape", "knobs"),
    [
        ("203x1024:fp32", {"strategy": "last_cta"}),
        ("203x1001:bf16", {"strategy": "column_slices"}),  # dbeta begins at an odd place
        ("203x770:fp16:fp32", {"strategy": "mailbox"}),
        ("203x1002:bf16", {"strategy": "semaphore"}),
        ("9x1:fp32", {"strategy": "separate"}),
        ("300x64:bf16", {"strategy": "mailbox", "threads_per_row": 8}),
        ("203x1024:bf16+offset+residual_fp32", {"strategy": "column_slices"}),
        ("203x1024:fp16:fp32+residual", {"strategy": "bulk_reduce"}),
        ("97x8192:bf16", {"strategy": "column_slices", "cluster": 2}),
        ("97x8192:bf16", {"strategy": "mailbox", "cluster": 4, "arrival": "early"}),
        ("97x8192:fp32", {"strategy": "atomic", "cluster": 4}),
    ],
)
def test_shapes_dtypes_options_and_clusters(
    shape: str, knobs: dict[str, int | str], target: Target
) -> None:
    problem = Problem.parse(f"layernorm_backward:{shape}")
    variant = sample_variant(problem, target, SEED, **knobs)
    check = check_variant(variant, problem, schedules=8, seed=SEED)
    assert check.problems == ()
    assert check.schedules == 8
