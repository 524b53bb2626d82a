"""The backward of RMSNorm with bits that do not depend on the batch: what RMSNorm's backward
computes, by kernels of another search space."""

from __future__ import annotations

from dataclasses import replace

from generator.operations.operation import FrontEnd
from generator.operations.rmsnorm_backward import RMSNORM_BACKWARD

RMSNORM_INVARIANT_BACKWARD = replace(
    RMSNORM_BACKWARD,
    name="rmsnorm_invariant_backward",
    front_end=FrontEnd(
        norm="RMSNorm",
        module="frontends.batch_invariant",
        package="BatchInvariantPackage",
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
            "set_sm_margin",
            "uninstall",
            "unpatch",
            "warmup",
        ),
    ),
    forward="rmsnorm_invariant_forward",
    fallbacks=False,
    tiles=True,
)
