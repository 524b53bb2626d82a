"""RMSNorm behind a layer, whose result is added to the residual stream: y = r + norm(x) * w, as in
OLMo 2 and Gemma 2 and 3.

The norm, its product with the weight and the sum are computed in fp32, and y is rounded once.
PyTorch's operators one by one round norm(x) * w to x's dtype first, and then the sum. The backward
is that of RMSNorm: dr is dy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .row_operation import RowOperation, Terms
from .signature import Signature
from .tensor import columns, number, row_out, rows, rows_out

if TYPE_CHECKING:
    import torch


def terms(x: torch.Tensor, r: torch.Tensor, weight: torch.Tensor | float, eps: float) -> Terms:
    """Return the terms of y = r + x * rstd * w, and rstd = 1 / sqrt(mean(x^2) + eps)."""
    rstd = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return {"y": (x * rstd * weight, r), "rstd": (rstd,)}


RMSNORM_ADD_FORWARD = RowOperation(
    name="rmsnorm_add_forward",
    signature=Signature(
        rows("x"),
        rows("r"),
        columns("weight"),
        rows_out("y"),
        row_out("rstd"),
        number("eps"),
        row_sums=1,
    ),
    terms=terms,
)
