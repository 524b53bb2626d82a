"""The operations that the library has kernels and a formula of."""

from __future__ import annotations

from dataclasses import replace

from .gated_rmsnorm_backward import GATED_BACKWARDS
from .gated_rmsnorm_forward import GATED_FORWARDS
from .layernorm_backward import LAYERNORM_BACKWARD
from .layernorm_forward import LAYERNORM_FORWARD
from .rmsnorm_add_forward import RMSNORM_ADD_FORWARD
from .rmsnorm_backward import RMSNORM_BACKWARD
from .rmsnorm_quantized import (
    FORMATS,
    RMSNORM_FP8_FORWARD,
    RMSNORM_MXFP8_FORWARD,
    STREAM_FORMATS,
)
from .rmsnorm_quantized_backward import BACKWARD_FORMATS
from .rmsnorm_rope import RMSNORM_ROPE_BACKWARD, RMSNORM_ROPE_FORWARD
from .rmsnorm_sum_backward import GRADIENTS, RMSNORM_SUM_BACKWARDS
from .rope import ROPE
from .row_operation import RowOperation
from .signature import Signature
from .tensor import (
    added_columns,
    added_rows,
    columns,
    copied_rows,
    flag,
    group,
    number,
    row,
    row_out,
    rows,
    rows_out,
    sums,
)

RMSNORM_INVARIANT_BACKWARD = replace(RMSNORM_BACKWARD, name="rmsnorm_invariant_backward")
"""RMSNorm's backward whose bits do not depend on the batch."""

GATED = tuple(o.name for some in (GATED_BACKWARDS, GATED_FORWARDS) for o in some.values())
"""The operations of gated norms, by name."""

ROTATED = (RMSNORM_ROPE_BACKWARD.name, RMSNORM_ROPE_FORWARD.name, ROPE.name)
"""The operations of RMSNorm with the rotary embedding and of this alone, by name."""

SUMMED = tuple(operation.name for operation in RMSNORM_SUM_BACKWARDS.values())
"""The backwards of RMSNorm whose gradient is a sum, by name."""

QUANTIZED = tuple(
    o.name for some in (FORMATS, BACKWARD_FORMATS, STREAM_FORMATS) for o in some.values()
)
"""The operations of RMSNorm, and of its backward, that are quantized to FP8, by name."""

OPERATIONS: dict[str, RowOperation] = {
    operation.name: operation
    for operation in (
        RMSNORM_BACKWARD,
        LAYERNORM_BACKWARD,
        LAYERNORM_FORWARD,
        RMSNORM_INVARIANT_BACKWARD,
        RMSNORM_ADD_FORWARD,
        *GATED_BACKWARDS.values(),
        *GATED_FORWARDS.values(),
        RMSNORM_ROPE_BACKWARD,
        RMSNORM_ROPE_FORWARD,
        ROPE,
        *FORMATS.values(),
        *BACKWARD_FORMATS.values(),
        *STREAM_FORMATS.values(),
        *RMSNORM_SUM_BACKWARDS.values(),
    )
}
"""All operations by name; `register` adds a user's own."""


def register(operation: RowOperation) -> None:
    """Make an operation from outside of the library known. Raises ValueError where another one has
    its name."""
    known = OPERATIONS.setdefault(operation.name, operation)
    if known is not operation and known.signature != operation.signature:
        raise ValueError(f"there is an operation called {operation.name}: choose another name")


def signature_of(operation: str) -> Signature:
    """Raises KeyError for an unknown operation."""
    return OPERATIONS[operation].signature


__all__ = [
    "BACKWARD_FORMATS",
    "FORMATS",
    "GATED",
    "GATED_BACKWARDS",
    "GATED_FORWARDS",
    "GRADIENTS",
    "LAYERNORM_BACKWARD",
    "LAYERNORM_FORWARD",
    "OPERATIONS",
    "QUANTIZED",
    "RMSNORM_ADD_FORWARD",
    "RMSNORM_BACKWARD",
    "RMSNORM_FP8_FORWARD",
    "RMSNORM_INVARIANT_BACKWARD",
    "RMSNORM_MXFP8_FORWARD",
    "RMSNORM_ROPE_BACKWARD",
    "RMSNORM_ROPE_FORWARD",
    "RMSNORM_SUM_BACKWARDS",
    "ROPE",
    "ROTATED",
    "STREAM_FORMATS",
    "SUMMED",
    "RowOperation",
    "Signature",
    "added_columns",
    "added_rows",
    "columns",
    "copied_rows",
    "flag",
    "group",
    "number",
    "register",
    "row",
    "row_out",
    "rows",
    "rows_out",
    "signature_of",
    "sums",
]
