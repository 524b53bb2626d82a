"""What is computed, one object for each operation: arguments, inputs, float64 references, error
bounds, bytes moved, template and front end."""

from generator.operations.layernorm_backward import LAYERNORM_BACKWARD
from generator.operations.operation import Operation
from generator.operations.rmsnorm_backward import RMSNORM_BACKWARD
from generator.operations.rmsnorm_forward import RMSNORM_FORWARD
from generator.operations.rmsnorm_invariant_backward import RMSNORM_INVARIANT_BACKWARD
from generator.problem import Problem

OPERATIONS = {
    operation.name: operation
    for operation in (
        RMSNORM_BACKWARD,
        RMSNORM_FORWARD,
        LAYERNORM_BACKWARD,
        RMSNORM_INVARIANT_BACKWARD,
    )
}


def operation_of(problem: Problem) -> Operation:
    """What a problem is one call of."""
    return OPERATIONS[problem.operation]


__all__ = [
    "LAYERNORM_BACKWARD",
    "OPERATIONS",
    "RMSNORM_BACKWARD",
    "RMSNORM_FORWARD",
    "RMSNORM_INVARIANT_BACKWARD",
    "Operation",
    "operation_of",
]
