"""The backward of a gated RMSNorm, as in Mamba-2 and Qwen3-Next: y = rmsnorm(x) * w * silu(z)."""

from __future__ import annotations

import torch

from normforge.operations import RowOperation, Signature, columns, row, rows, rows_out, sums


def terms(
    x: torch.Tensor, z: torch.Tensor, dy: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor
) -> dict[str, tuple[torch.Tensor, ...]]:
    """The terms of dx and dz, and of dw those of every row."""
    normalized, gate = x * rstd, torch.sigmoid(z)
    through = dy * z * gate  # the gradient behind the gate
    weighted = through * weight
    along = normalized * (weighted * normalized).mean(-1, keepdim=True)
    slope = dy * normalized * weight * gate
    return {
        "dx": (rstd * weighted, -rstd * along),
        "dz": (slope, slope * z * (1 - gate)),
        "dw": (through * normalized,),
    }


def forward(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """y, and what the backward needs."""
    rstd = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    y = x * rstd * weight * torch.nn.functional.silu(z)
    return y, {"x": x, "z": z, "rstd": rstd, "weight": weight}


OPERATION = RowOperation(
    name="gated_rmsnorm_backward",
    signature=Signature(
        rows("x"),
        rows("z"),
        rows("dy"),
        row("rstd"),
        columns("weight"),
        rows_out("dx"),
        rows_out("dz"),
        sums("dw"),
        row_sums=1,
        summed=True,
    ),
    terms=terms,
    forward=forward,
    gradients={"x": "dx", "z": "dz", "weight": "dw"},
)
