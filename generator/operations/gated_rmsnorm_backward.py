"""The backwards of gated RMSNorms, as the tuner knows them."""

from __future__ import annotations

from generator.operations.operation import FrontEnd
from generator.operations.rows import row_operation
from normforge import operations

FRONT_END = FrontEnd(
    norm="RMSNormGated",
    module="frontends.gated",
    package="GatedPackage",
    functions=("explain", "operators", "patch", "rms_norm_gated", "unpatch"),
)
GATED_BACKWARDS = tuple(
    row_operation(operation, FRONT_END) for operation in operations.GATED_BACKWARDS.values()
)
