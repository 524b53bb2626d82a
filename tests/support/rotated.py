"""Kernels of rotated norms in the emulator: pipelines, configs for heads, and how far a result is
off."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from generator.kernels.variant import Variant
from generator.operations.rows import make_reference
from generator.problem import Problem
from generator.target import Target
from normforge import operations as library
from tests.support.emulator import run_to_one_result, small

FORWARD, BACKWARD = "rmsnorm_rope_forward", "rmsnorm_rope_backward"
of_name = pytest.mark.parametrize("name", [FORWARD, BACKWARD])
PIPELINES: dict[str, dict[str, int | str]] = {
    "direct": {"pipeline": "direct"},
    "bulk": {"pipeline": "bulk", "stages": 2, "rows_in_flight": 2},
    "async": {"pipeline": "async", "stages": 2, "reload": "smem", "weight_in": "smem"},
    "producer": {"pipeline": "producer", "stages": 3, "rows_per_cta": 3, "reload": "smem"},
}


WIDE: dict[str, Any] = {"threads_per_row": 128, "grid": "full"}
HEADS: dict[str, Any] = {"threads_per_row": 8, "rows_per_cta": 8, "grid": "full"}
"""Configs for rows of joined heads, and for heads."""


def at_strides(inputs: Any, dtype: torch.dtype) -> Any:
    """Return inputs with cos and sin in a dtype, of which the rows of sin lie further apart."""
    wider = torch.cat((inputs.sin, inputs.sin), 1).to(dtype)[:, : inputs.sin.shape[1]]
    return replace(inputs, cos=inputs.cos.to(dtype), sin=wider)


def fitting(name: str, shape: str) -> str:
    """Return a shape without what an operation without a weight does not have."""
    weighted = library.signature_of(name).columns is not None
    return shape if weighted else re.sub(r"(:\w+):fp32|\+offset", r"\1", shape)


def of_heads(problem: Problem, target: Target, threads_per_row: int) -> Variant:
    """A config with several teams, whose rows are shared by so many threads each."""
    teams = 8 if threads_per_row in (8, 16, 32, 64, 128) else 4
    return small(problem, target, threads_per_row=threads_per_row, rows_per_cta=teams)


def fault_of(variant: Variant, problem: Problem, inputs: Any) -> str:
    """Compare the outputs for these inputs with float64: "" or what is off."""
    found = run_to_one_result(variant, inputs)
    operation = library.OPERATIONS[problem.operation]
    reference = make_reference(operation, problem, inputs)
    for name, exact in reference.outputs.items():
        unit = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}[problem.dtype]
        slack = unit * exact.abs() + 64 * 2.0**-24 * reference.scales[name] + 1e-30
        if bool(((found[name].double() - exact).abs() > slack).any()):
            return name
    return ""
