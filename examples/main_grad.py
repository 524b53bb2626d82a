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
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # dx and dw have no gradient of their own. PyTorch's once_differentiable would let
        # torch.autograd.grad pass that over in silence.
        if torch.is_grad_enabled():
            raise RuntimeError("MainGradNorm has no second derivative: run without create_graph")
        x, weight, rstd = ctx.saved_tensors
        dx, _ = rmsnorm_backward(dy, x, rstd, weight, dw_out=weight.main_grad, accumulate=True)
        return dx, None, None


class Model(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.weight = nn.Parameter(torch.ones(width))

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return MainGradNorm.apply(x, self.weight, 1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x)))


class PlainModel(Model):
    """The same by PyTorch, with the norm in fp32 inside: only here to compare with."""

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x.float(), self.weight.shape, self.weight, 1e-6).to(x.dtype)


def add_to_main_grad(parameter: torch.Tensor) -> None:
    """A trainer's hook, for the weights of other layers."""
    if parameter.grad is not None:
        parameter.main_grad += parameter.grad
        parameter.grad = None


def main() -> dict[str, float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = Model().to(device, torch.bfloat16)
    plain = PlainModel().to(device, torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    plain.weight = nn.Parameter(plain.weight.float())  # its dw is not rounded to bf16 either

    for parameter in (*model.parameters(), *plain.parameters()):
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.register_post_accumulate_grad_hook(add_to_main_grad)
    batches, targets = torch.randn(2, 4, 512, 256, device=device).bfloat16()
    for batch, target in zip(batches, targets, strict=True):
        for each in (model, plain):
            nn.functional.mse_loss(each(batch).float(), target.float()).backward()

    errors = {}
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        distance = (ours.main_grad - theirs.main_grad).norm()
        errors[name] = float(distance / theirs.main_grad.norm())
        print(
            f"{name}: main_grad differs by {errors[name]:.1e} from the sum of PyTorch's gradients"
        )
    return errors


if __name__ == "__main__":
    main()
