"""RMSNorm that is added to a residual stream, as the tuner knows it."""

from __future__ import annotations

from typing import Any

import torch

from generator.operations.operation import FrontEnd
from generator.operations.rmsnorm_backward import RMSNORM_BACKWARD
from generator.operations.rows import inputs_class, row_operation
from generator.problem import Problem
from normforge import operations
from normforge.operations.rmsnorm_backward import EPS

_INPUTS = inputs_class(operations.RMSNORM_ADD_FORWARD.signature)


def make_inputs(problem: Problem, device: torch.device, **how: Any) -> Any:
    """Make the inputs of RMSNorm's backward, with its incoming gradient as r. how: as for it."""
    given = RMSNORM_BACKWARD.make_inputs(problem, device, **how)
    return _INPUTS(given.x, given.dy, given.weight, EPS, given.offset)


RMSNORM_ADD_FORWARD = row_operation(
    operations.RMSNORM_ADD_FORWARD,
    FrontEnd(
        norm="",
        module="frontends.norm_add",
        package="NormAddPackage",
        functions=("explain", "rmsnorm_forward"),
    ),
    make_inputs=make_inputs,
    make_cancelling=lambda problem, inputs, seed=1: inputs,
)
