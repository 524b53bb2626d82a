"""LayerNorm, as the tuner knows it."""

from __future__ import annotations

from typing import Any

import torch

from generator.operations.layernorm_backward import LAYERNORM_BACKWARD
from generator.operations.operation import FrontEnd
from generator.operations.rows import inputs_class, row_operation
from generator.problem import Problem
from normforge import operations
from normforge.operations.layernorm_backward import EPS

_INPUTS = inputs_class(operations.LAYERNORM_FORWARD.signature)


def make_inputs(problem: Problem, device: torch.device, seed: int = 0) -> Any:
    """Make rows and a weight as the backward's, and a bias."""
    given = LAYERNORM_BACKWARD.make_inputs(problem, device, seed=seed)
    generator = torch.Generator(device).manual_seed(seed + 1)
    bias = 0.5 * torch.randn(problem.N, generator=generator, device=device)
    return _INPUTS(given.x, given.weight, bias.to(given.weight.dtype), EPS, given.offset)


LAYERNORM_FORWARD = row_operation(
    operations.LAYERNORM_FORWARD,
    FrontEnd(
        norm="",
        module="frontends.layer_norm_forward",
        package="LayerNormForwardPackage",
        functions=("explain", "layer_norm_forward"),
    ),
    make_inputs=make_inputs,
    fallbacks=True,
    make_cancelling=lambda problem, inputs, seed=1: inputs,
)
