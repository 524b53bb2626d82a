"""Gradients accumulated in fp32, as Megatron's `main_grad`: the kernel adds dw to the buffer.

    PYTHONPATH=. python examples/main_grad.py

Every micro-batch adds its dw to weight.main_grad in fp32 and in a fixed order; weight.grad is not
used. That is one call of rmsnorm_backward inside an autograd function of the trainer's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from generated.h200.rmsnorm_backward import rms_norm, rmsnorm_backward


class MainGradNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return rms_norm(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        x, weight, rstd = ctx.saved_tensors
        dx, _ = rmsnorm_backward(dy, x, rstd, weight, dw_out=weight.main_grad, accumulate=True)
        return dx, None, None


class Model(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(MainGradNorm.apply(x, self.weight, 1e-6))


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = Model().to(device, torch.bfloat16)
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)

    batches = torch.randn(4, 512, 256, device=device).bfloat16()
    for batch in batches:
        model(batch).float().square().mean().backward()
        main_grad, grad = model.linear.weight.main_grad, model.linear.weight.grad
        main_grad += grad  # what the trainer's hooks do for other layers
        model.linear.weight.grad = None

    assert model.weight.grad is None
    wide = model.weight.detach().float().requires_grad_()
    for batch in batches:
        rows = batch.float()
        y = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-6) * wide
        (y @ model.linear.weight.detach().float().T).square().mean().backward()
    error = (model.weight.main_grad - wide.grad).norm() / wide.grad.norm()
    print(f"main_grad after {len(batches)} micro-batches: {error:.1e} from fp32 throughout")


if __name__ == "__main__":
    main()
