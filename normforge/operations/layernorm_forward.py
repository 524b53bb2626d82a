"""LayerNorm (Ba, Kiros and Hinton, "Layer Normalization", 2016), with what its backward needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .row_operation import RowOperation, Terms
from .signature import Signature
from .tensor import added_columns, columns, number, row_out, rows, rows_out

if TYPE_CHECKING:
    import torch


def terms(
    x: torch.Tensor, weight: torch.Tensor | float, bias: torch.Tensor | float, eps: float
) -> Terms:
    """Return the terms of y = (x - mean) * rstd * w + b, of mean, in which numbers of both signs
    cancel, and of rstd = 1 / sqrt(mean((x - mean)^2) + eps)."""
    means = (x.clamp(min=0).mean(-1, keepdim=True), x.clamp(max=0).mean(-1, keepdim=True))
    centred = x - (means[0] + means[1])
    rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    return {
        "y": (centred * rstd * weight, x.new_zeros(()) + bias),
        "mean": means,
        "rstd": (rstd,),
    }


LAYERNORM_FORWARD = RowOperation(
    name="layernorm_forward",
    signature=Signature(
        rows("x"),
        columns("weight"),
        added_columns("bias"),
        rows_out("y"),
        row_out("mean"),
        row_out("rstd"),
        number("eps"),
        row_sums=2,
        later_sums=2,
        summed=True,
    ),
    terms=terms,
)
