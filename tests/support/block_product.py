"""PyTorch's product of FP8 blocks, for machines that have none."""

from __future__ import annotations

from typing import Any

import torch


def scaled_mm(
    rows: torch.Tensor, weight: torch.Tensor, scales: Any, weight_scales: Any, out_dtype: Any
) -> torch.Tensor:
    """Compute what torch._scaled_mm does with blocks of 1x128 and 128x128."""
    x = rows.float().unflatten(-1, (-1, 128)) * scales[..., None]
    wide = weight_scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (x.flatten(-2) @ (weight.float() * wide)).to(out_dtype)
