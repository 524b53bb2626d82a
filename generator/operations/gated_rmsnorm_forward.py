"""Gated RMSNorms, as the tuner knows them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from generator.operations.gated_rmsnorm_backward import FRONT_END, GATED_BACKWARDS
from generator.operations.operation import Operation
from generator.operations.rows import inputs_class, row_operation
from generator.problem import Problem
from normforge import operations


def make_inputs(backward: Operation, problem: Problem, device: torch.device, **how: Any) -> Any:
    """Make the inputs of the backward, but for the incoming gradient. how: as for it."""
    given = backward.make_inputs(problem, device, **how)
    (made,) = {inputs_class(one.signature) for one in operations.GATED_FORWARDS.values()}
    return made(given.x, given.z, given.weight, given.eps, given.offset)


GATED_FORWARDS = tuple(
    row_operation(
        operation,
        FRONT_END,
        make_inputs=partial(make_inputs, backward),
        make_cancelling=lambda problem, inputs, seed=1: inputs,
    )
    for operation, backward in zip(operations.GATED_FORWARDS.values(), GATED_BACKWARDS, strict=True)
)
