"""The backward of LayerNorm (Ba, Kiros and Hinton, "Layer Normalization", 2016)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .rmsnorm_backward import RMSNORM_BACKWARD
from .row_operation import RowOperation, Terms
from .tensor import row

if TYPE_CHECKING:
    import torch

EPS = 1e-5
"""The eps of the forward that makes inputs for tuning and for tests."""


def terms(
    x: torch.Tensor,
    dy: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | float,
    mean: torch.Tensor,
) -> Terms:
    """Return the terms of dx = rstd * (w * dy - mean(w * dy) - xhat * mean(xhat * w * dy)), dgamma
    = sum over rows of dy * xhat, dbeta = sum over rows of dy, with xhat = (x - mean) * rstd."""
    normalized = (x - mean) * rstd
    weighted = dy * weight
    along = normalized * (weighted * normalized).mean(-1, keepdim=True)
    shift = weighted.mean(-1, keepdim=True)
    return {
        "dx": (rstd * weighted, -rstd * along, -rstd * shift),
        "dw": (dy * normalized, dy),
    }


def forward(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return y = xhat * w without a bias, and what the backward needs."""
    mean = x.mean(-1, keepdim=True)
    rstd = ((x - mean).square().mean(-1, keepdim=True) + EPS).rsqrt()
    y = (x - mean) * rstd * weight
    return y, {"x": x, "mean": mean, "rstd": rstd, "weight": weight}


LAYERNORM_BACKWARD = RowOperation(
    name="layernorm_backward",
    # dw is dgamma, and behind it dbeta. The kernels take the mean behind all else.
    signature=RMSNORM_BACKWARD.signature.counting(dw=2).with_tensor(
        row("mean", value="mean", behind=True), row_sums=2
    ),
    terms=terms,
    forward=forward,
    gradients={"x": "dx", "weight": "dw"},
)
