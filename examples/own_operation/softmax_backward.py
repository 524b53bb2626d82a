"""The backward of softmax over rows: dx = y * (dy - sum(y * dy))."""

from __future__ import annotations

import torch

from normforge.operations import RowOperation, Signature, rows, rows_out


def terms(y: torch.Tensor, dy: torch.Tensor) -> dict[str, tuple[torch.Tensor, ...]]:
    """The terms of dx, whose sum it is."""
    return {"dx": (y * dy, -y * (y * dy).sum(-1, keepdim=True))}


def forward(x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """y, which is also what the backward needs."""
    y = torch.softmax(x, dim=-1)
    return y, {"y": y}


OPERATION = RowOperation(
    name="softmax_backward",
    signature=Signature(rows("y"), rows("dy"), rows_out("dx"), row_sums=1, summed=True),
    terms=terms,
    forward=forward,
    gradients={"x": "dx"},
)
