"""The formula in plain PyTorch: serves CPU tensors, and says what the kernels compute."""

from __future__ import annotations

import torch


def reference_backward(
    dy: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """dx and dw of y = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + eps) per row.

    dy, x: (..., N); rstd: one value per row; weight: (N,). With xhat = x * rstd and
    g = dy * weight: dx = rstd * (g - xhat * mean(g * xhat)); dw = sum of dy * xhat over the rows.
    Everything is computed in fp32 (in float64 for float64 inputs) and rounded once at the end.
    dx is contiguous and of x's shape and dtype, dw of the weight's.
    """
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    with torch.no_grad():
        grad = dy.to(compute)
        scale = rstd.to(compute).reshape(*x.shape[:-1], 1)
        normalized = x.to(compute) * scale
        weighted = grad * weight.to(compute)
        mean = (weighted * normalized).mean(-1, keepdim=True)
        dx = (scale * (weighted - normalized * mean)).to(x.dtype)
        dw = (grad * normalized).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
    return dx.contiguous(), dw
