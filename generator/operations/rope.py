"""The rotary embedding of heads, as the tuner knows it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from generator.operations.rmsnorm_rope import FRONT_END, RMSNORM_ROPE_BACKWARD
from generator.operations.rows import inputs_class, row_operation
from generator.problem import Problem
from normforge import operations

_INPUTS = inputs_class(operations.ROPE.signature)


def make_inputs(problem: Problem, device: torch.device, **how: Any) -> Any:
    """Make the inputs of a rotation, those of a rotation behind a norm. how: as for it."""
    given = RMSNORM_ROPE_BACKWARD.make_inputs(problem, device, **how)
    return _INPUTS(given.x, given.cos, given.sin, 1.0, given.interleaved, heads=given.heads)


ROPE = row_operation(
    operations.ROPE,
    replace(FRONT_END, functions=("apply_rope", "explain", "operators")),
    make_inputs=make_inputs,
    make_cancelling=lambda problem, inputs, seed=1: replace(inputs, sign=-1.0),
)
