"""Kernels for rows that are no whole vectors on a GPU: accurate, with equal bits in every run, and
chosen by the package for the calls that they can serve."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from generator.evaluate.gpu.protocol import Candidate
from generator.evaluate.gpu.workload import Workload
from generator.evaluate.verify.accuracy import check_accuracy, compare_all
from generator.evaluate.verify.determinism import check_call_options, check_repeats
from generator.kernels.cubin_cache import compile_variant
from generator.kernels.nvrtc import Compiled
from generator.kernels.resource_gate import refuse
from generator.kernels.variant import Variant, make_variant
from generator.package.emit import emit_package
from generator.package.entries import PROVENANCE_KEYS, Entry
from generator.package.fallback_kernels import fallback_variants
from generator.problem import Problem
from generator.space.legal_configs import LegalConfigs
from generator.space.load import load_space
from generator.target import Target
from normforge.api import Package

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("served_by_kernels")]

SPACE = load_space()
CUDA = torch.device("cuda", 0)
ROWS = (1, 2, 131, 132, 264, 265, 528, 529, 4099)
"""Fewer than the teams of a grid, about as many, and many more."""


def runnable(problem: Problem, here: Target, seed: int = 0) -> tuple[Variant, Compiled]:
    """A random kernel with a producer and 16-byte vectors that neither spills nor asks for more
    CTAs than fit."""
    if not here.has_bulk_copy:
        pytest.skip(f"{here} has no bulk copies")
    legal, rng = LegalConfigs(SPACE, problem, here), random.Random(f"{problem} {seed}")
    for _ in range(200):
        config = legal.draw(rng, ())
        if config is None or config["vector_bytes"] != 16 or config["strategy"] == "atomic":
            continue
        variant = make_variant(config, problem)
        if variant.determinism == "none":
            continue
        compiled = compile_variant(variant, here.arch)
        if refuse(variant, compiled, problem, here) is None:
            return variant, compiled
    raise AssertionError(f"no runnable kernel of {problem}")


@pytest.mark.parametrize(
    "shape",
    [
        *("4099x4095:bf16", "4099x4094:bf16", "4099x2047:fp16", "4099x1023:bf16"),
        *("3001x5001:bf16", "4099x33:bf16", "4099x1023:fp32", "4099x2047:bf16:fp32+offset"),
    ],
)
def test_kernels_are_accurate_and_repeat_their_bits(here: Target, shape: str) -> None:
    problem = Problem.parse(shape)
    for seed in range(2):
        variant, compiled = runnable(problem, here, seed)
        spec = variant.spec(here.sms)
        for M in ROWS:
            work = Workload(replace(problem, M=M), CUDA)
            bench = work.bench(Candidate(compiled.cubin, spec))
            accuracy = check_accuracy(bench, work.inputs, work.expected)
            assert accuracy.fault == "", (variant, M, accuracy.fault)
            assert check_repeats(bench, work.cancelling) == "", (variant, M)
            found = check_call_options(bench, work.inputs, variant.signature, packs=False)
            assert found == "", (variant, M)


@pytest.fixture(scope="module")
def package(here: Target, tmp_path_factory: pytest.TempPathFactory) -> Package:
    """One tuned shape, and the kernels for any row of its dtype."""
    problem = Problem.parse("4099x1023:bf16")
    folder: Path = tmp_path_factory.mktemp("gpu") / "rmsnorm_backward"
    facts = dict.fromkeys(PROVENANCE_KEYS, "known")
    entry = Entry(problem, *runnable(problem, here), "measured", facts)
    some = [v for v in fallback_variants(here) if (v.dtype, v.weight_dtype) == ("bf16", "bf16")]
    fits = [v for v in some if v["vector_bytes"] == 2 and v.least <= problem.N <= v.N]
    emit_package([entry], [(v, compile_variant(v, here.arch)) for v in fits], here, folder)
    return Package(folder)


@pytest.mark.parametrize("kind", ["aligned", "unaligned x", "unaligned dy", "gaps", "over dy"])
def test_calls_are_right_wherever_their_rows_lie(package: Package, kind: str) -> None:
    problem = Problem.parse("4099x1023:bf16")
    work = Workload(problem, CUDA)
    inputs = work.inputs
    given = {"x": inputs.x, "dy": inputs.dy.clone()}
    for name in given:
        if kind == f"unaligned {name}":
            memory = given[name].new_empty(given[name].numel() + 1)[1:].view(given[name].shape)
            given[name] = memory.copy_(given[name])
        elif kind == "gaps":
            wide = given[name].new_full((problem.M, problem.N + 1), torch.nan)
            wide[:, :-1] = given[name]
            given[name] = wide[:, :-1]
    more = {"dx_out": given["dy"]} if kind == "over dy" else {}
    call = package.rmsnorm_backward
    dx, dw = call(given["dy"], given["x"], inputs.rstd, inputs.weight, **more)
    assert dx is not None and dw is not None
    assert compare_all({"dx": dx, "dw": dw}, work.expected).fault == ""
