"""The backward of RMSNorm, as the tuner knows it."""

from __future__ import annotations

from functools import partial

from generator.operations.operation import FrontEnd
from generator.operations.rows import inputs_class, row_operation
from generator.operations.rows import make_reference as reference_of
from normforge import operations

RMSNORM_BACKWARD = row_operation(
    operations.RMSNORM_BACKWARD,
    FrontEnd(
        norm="RMSNorm",
        module="api",
        package="Package",
        functions=(
            "explain",
            "graph_pass",
            "inductor_backend",
            "install",
            "installed",
            "operators",
            "patch",
            "rms_norm",
            "rmsnorm_backward",
            "rmsnorm_forward",
            "uninstall",
            "unpatch",
            "use_native",
            "warmup",
        ),
    ),
    forward="rmsnorm_forward",
    fallbacks=True,
)
Inputs = inputs_class(operations.RMSNORM_BACKWARD.signature)
"""x, dy: (M, N); rstd: (M,) fp32; weight: (N,), to which `offset` is added in fp32; dresidual:
(M, N), the gradient that is added to dx."""
make_inputs = RMSNORM_BACKWARD.make_inputs
make_cancelling = RMSNORM_BACKWARD.make_cancelling
make_reference = partial(reference_of, operations.RMSNORM_BACKWARD)
