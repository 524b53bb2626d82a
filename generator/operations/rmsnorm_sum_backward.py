"""The backwards of an RMSNorm whose gradient is a sum, as the tuner knows them."""

from __future__ import annotations

from generator.operations.operation import FrontEnd
from generator.operations.rows import row_operation
from normforge import operations

FRONT_END = FrontEnd(
    norm="",
    module="frontends.sum_backward",
    package="SumBackwardPackage",
    functions=("explain", "rmsnorm_backward"),
)
RMSNORM_SUM_BACKWARDS = tuple(
    row_operation(operation, FRONT_END) for operation in operations.RMSNORM_SUM_BACKWARDS.values()
)
