"""The backward of a modulated RMSNorm, as in diffusion transformers: y = rmsnorm(x) * w * (1 +
scale), with a scale for every element."""

from __future__ import annotations

import torch

from normforge.operations import RowOperation, Signature, columns, number, rows, rows_out, sums


def terms(
    x: torch.Tensor, scale: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor, eps: float
) -> dict[str, tuple[torch.Tensor, ...]]:
    """The terms of dx and dscale, and of dw those of every row."""
    rstd = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    normalized, through = x * rstd, dy * (1 + scale)  # the gradient behind the modulation
    weighted = through * weight
    along = normalized * (weighted * normalized).mean(-1, keepdim=True)
    return {
        "dx": (rstd * weighted, -rstd * along),
        "dscale": (dy * normalized * weight,),
        "dw": (through * normalized,),
    }


def forward(
    x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor | float]]:
    """y, and what the backward needs."""
    eps = 1e-6
    rstd = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = x * rstd * weight * (1 + scale)
    return y, {"x": x, "scale": scale, "eps": eps, "weight": weight}


OPERATION = RowOperation(
    name="modulated_rmsnorm_backward",
    signature=Signature(
        rows("x"),
        rows("scale"),
        rows("dy"),
        columns("weight"),
        rows_out("dx"),
        rows_out("dscale"),
        sums("dw"),
        number("eps"),
        row_sums=2,
        summed=True,
    ),
    terms=terms,
    forward=forward,
    gradients={"x": "dx", "scale": "dscale", "weight": "dw"},
)
