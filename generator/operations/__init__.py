"""The operations, one object for each: arguments, inputs, float64 references, error bounds, bytes
moved, template and front end."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from generator.errors import NormforgeError
from generator.operations.gated_rmsnorm_backward import GATED_BACKWARDS
from generator.operations.gated_rmsnorm_forward import GATED_FORWARDS
from generator.operations.layernorm_backward import LAYERNORM_BACKWARD
from generator.operations.layernorm_forward import LAYERNORM_FORWARD
from generator.operations.operation import Operation
from generator.operations.own import add_operation, add_operations_of_run
from generator.operations.rmsnorm_add_forward import RMSNORM_ADD_FORWARD
from generator.operations.rmsnorm_backward import RMSNORM_BACKWARD
from generator.operations.rmsnorm_forward import RMSNORM_FORWARD, RMSNORM_INVARIANT_FORWARD
from generator.operations.rmsnorm_invariant_backward import RMSNORM_INVARIANT_BACKWARD
from generator.operations.rmsnorm_quantized import RMSNORM_QUANTIZED
from generator.operations.rmsnorm_rope import RMSNORM_ROPE_BACKWARD, RMSNORM_ROPE_FORWARD
from generator.operations.rmsnorm_sum_backward import RMSNORM_SUM_BACKWARDS
from generator.operations.rope import ROPE
from generator.problem import FORWARDS, Problem
from normforge import operations as library

OPERATIONS = {
    operation.name: operation
    for operation in (
        RMSNORM_BACKWARD,
        RMSNORM_FORWARD,
        LAYERNORM_BACKWARD,
        LAYERNORM_FORWARD,
        RMSNORM_INVARIANT_BACKWARD,
        RMSNORM_INVARIANT_FORWARD,
        RMSNORM_ADD_FORWARD,
        *GATED_BACKWARDS,
        *GATED_FORWARDS,
        RMSNORM_ROPE_BACKWARD,
        RMSNORM_ROPE_FORWARD,
        ROPE,
        *RMSNORM_QUANTIZED,
        *RMSNORM_SUM_BACKWARDS,
    )
}
add_operations_of_run(OPERATIONS)


def operation_name(text: str) -> str:
    """The name of an operation: one of the library's, or that of a user's file, which is read and
    checked. Raises NormforgeError."""
    if text.endswith(".py"):
        return add_operation(Path(text), OPERATIONS)
    if text in FORWARDS:
        raise NormforgeError(f"{text} is tuned with {FORWARDS[text]}, whose packages have both")
    if text not in library.OPERATIONS:
        near = get_close_matches(text, library.OPERATIONS, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise NormforgeError(
            f"there is no operation '{text}': {hint}known are {', '.join(library.OPERATIONS)}; one "
            "of your own is named by its file, which ends in .py"
        )
    return text


def operation_of(problem: Problem) -> Operation:
    """Return the operation that a problem is one call of."""
    return OPERATIONS[problem.operation]


__all__ = [
    "GATED_BACKWARDS",
    "GATED_FORWARDS",
    "LAYERNORM_BACKWARD",
    "LAYERNORM_FORWARD",
    "OPERATIONS",
    "RMSNORM_ADD_FORWARD",
    "RMSNORM_BACKWARD",
    "RMSNORM_FORWARD",
    "RMSNORM_INVARIANT_BACKWARD",
    "RMSNORM_QUANTIZED",
    "RMSNORM_ROPE_BACKWARD",
    "RMSNORM_ROPE_FORWARD",
    "RMSNORM_SUM_BACKWARDS",
    "ROPE",
    "Operation",
    "add_operation",
    "operation_name",
    "operation_of",
]
