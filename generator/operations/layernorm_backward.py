"""The backward of LayerNorm, as the tuner knows it."""

from __future__ import annotations

from functools import partial

from generator.operations.operation import FrontEnd
from generator.operations.row_inputs import make_inputs
from generator.operations.rows import inputs_class, row_operation
from normforge import operations

_CENTRES = 2.0
"""Rows lie around numbers from -2 to 2."""

Inputs = inputs_class(operations.LAYERNORM_BACKWARD.signature)
"""The inputs of RMSNorm's backward, and mean: (M,) fp32."""

LAYERNORM_BACKWARD = row_operation(
    operations.LAYERNORM_BACKWARD,
    FrontEnd(
        norm="LayerNorm",
        module="frontends.layer_norm",
        package="LayerNormPackage",
        functions=(
            "explain",
            "graph_pass",
            "inductor_backend",
            "install",
            "installed",
            "layer_norm",
            "layer_norm_backward",
            "layer_norm_forward",
            "operators",
            "patch",
            "uninstall",
            "unpatch",
            "use_native",
            "warmup",
        ),
    ),
    make_inputs=partial(make_inputs, operations.LAYERNORM_BACKWARD, Inputs, centres=_CENTRES),
    fallbacks=True,
)
