"""Spaces that extend those of rotated heads, for operations that have nothing to rotate or share:
every config that such a space draws is one that a kernel can have."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from generator.kernels.variant import make_variant
from generator.problem import Problem
from generator.space.load import load_space
from generator.target import Target
from tests.support.samples import space_of


@pytest.mark.parametrize("columns", [96, 192, 4096])
@pytest.mark.parametrize(
    ("extended", "operation"),
    [
        ("rope", "rmsnorm_add_forward"),
        ("rmsnorm_rope_forward", "layernorm_forward"),
        ("rmsnorm_rope_backward", "rmsnorm_backward"),
    ],
)
def test_operations_without_shared_numbers_have_kernels_of_all_configs(
    extended: str, operation: str, columns: int, tmp_path: Path, target: Target
) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(f"extends: {extended}\nknobs: {{}}\nrules: []\n", encoding="utf-8")
    space, problem = load_space(path), Problem.parse(f"4096x{columns}:bf16", operation)
    for seed in range(30):
        config = space.sample(problem, target, random.Random(seed))
        assert make_variant(config, problem).groups_ahead == 0


@pytest.mark.parametrize("shape", ["65536x96:bf16", "65536x128:bf16", "65536x192:fp16+interleaved"])
def test_rotations_have_kernels_of_all_configs(shape: str, target: Target) -> None:
    """Numbers of threads that do not divide a warp are drawn where a kernel can have them. What is
    asked for ahead comes behind the pipeline, which most of its values would rule out."""
    space, problem = space_of("rope"), Problem.parse(shape, "rope")
    names = [knob.name for knob in space.knobs]
    assert names.index("groups_ahead") > names.index("pipeline")
    drawn = [space.sample(problem, target, random.Random(seed)) for seed in range(60)]
    variants = [make_variant(config, problem) for config in drawn]
    uneven = {v["threads_per_row"] for v in variants if 32 % v["threads_per_row"]}
    assert (uneven & {5, 6, 7, 10, 12, 14} != set()) == (problem.N != 128)
    assert sum(v["pipeline"] == "direct" for v in variants) > 6
    assert {v.groups_ahead for v in variants if v["pipeline"] == "direct"} == {0}
    assert {v.groups_ahead for v in variants} == {0, 2, 4, 8}


def test_threads_that_have_one_column_of_a_pair_are_refused_in_words(target: Target) -> None:
    space, problem = space_of("rope"), Problem.parse("65536x96:bf16", "rope")
    config = next(space.legal(problem, target, fixed={"threads_per_row": 6}))
    rejection = space.reject({**config, "threads_per_row": 12}, problem, target)
    assert rejection is not None and rejection.rule == "parts_of_warps"
    assert "12 threads, which do not divide a warp, cannot exchange columns" in rejection.sentence
