"""RMSNorm of heads with the rotary embedding behind it, and its backward, as the tuner knows
them."""

from __future__ import annotations

from typing import Any

import torch

from generator.operations.operation import FrontEnd
from generator.operations.rows import inputs_class, row_operation
from generator.problem import Problem
from normforge import operations

FRONT_END = FrontEnd(
    norm="",
    module="frontends.rope",
    package="RotatedPackage",
    functions=("explain", "operators", "qk_norm_rope", "rms_norm_rope"),
)
RMSNORM_ROPE_BACKWARD = row_operation(operations.RMSNORM_ROPE_BACKWARD, FRONT_END)


def make_inputs(problem: Problem, device: torch.device, **how: Any) -> Any:
    """Make the inputs of the backward, but for the incoming gradient. how: as for it."""
    given = RMSNORM_ROPE_BACKWARD.make_inputs(problem, device, **how)
    made = inputs_class(operations.RMSNORM_ROPE_FORWARD.signature)
    shared = (given.cos, given.sin, given.eps, given.interleaved, given.joined)
    return made(given.x, given.weight, *shared, given.offset, given.heads)


RMSNORM_ROPE_FORWARD = row_operation(
    operations.RMSNORM_ROPE_FORWARD,
    FRONT_END,
    make_inputs=make_inputs,
    make_cancelling=lambda problem, inputs, seed=1: inputs,
)
