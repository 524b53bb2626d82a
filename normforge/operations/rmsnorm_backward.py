"""The backward of RMSNorm (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .row_operation import RowOperation, Terms
from .signature import Signature
from .tensor import added_rows, columns, copied_rows, row, rows, rows_out, sums

if TYPE_CHECKING:
    import torch

EPS = 1e-6
"""The eps of the forward that makes inputs for tuning and for tests."""


def terms(
    x: torch.Tensor, dy: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor | float
) -> Terms:
    """Return the terms of dx = rstd * (w * dy - xhat * mean(xhat * w * dy)), dw = sum over rows of
    dy * xhat, with xhat = x * rstd."""
    normalized = x * rstd
    weighted = dy * weight
    along = normalized * (weighted * normalized).mean(-1, keepdim=True)
    return {"dx": (rstd * weighted, -rstd * along), "dw": (dy * normalized,)}


def forward(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return y = xhat * w, and what the backward needs."""
    rstd = (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return x * rstd * weight, {"x": x, "rstd": rstd, "weight": weight}


RMSNORM_BACKWARD = RowOperation(
    name="rmsnorm_backward",
    signature=Signature(
        rows("x"),
        rows("dy"),
        row("rstd", value="scale"),
        columns("weight"),
        rows_out("dx", "null: not wanted. May be dy where rows are staged (rows_*.cuh)"),
        sums("dw"),
        added_rows("dresidual", option="residual", note="added to dx"),
        copied_rows(
            "dresidual_out",
            "dx",
            "residual",
            note="dx in the residual's dtype, if that differs from dx's",
        ),
        summed=True,
    ),
    terms=terms,
    forward=forward,
    gradients={"x": "dx", "weight": "dw"},
)
