"""Gradients accumulated in fp32, as Megatron's `main_grad`: the kernel adds dw to the buffer.

    PYTHONPATH=. python examples/main_grad.py

Every micro-batch adds its dw to weight.main_grad in fp32 and in a fixed order. RMSNorm keeps the
contract of Megatron's fused accumulation: it sets weight.grad_added_to_main_grad and gives autograd
a dummy, which the trainer's hook drops.
"""

from __future__ import annotations

import torch
from torch import nn

from normforge import RMSNorm


class Model(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.norm = RMSNorm(width, eps=1e-6, main_grad=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x)))


class PlainNorm(nn.RMSNorm):
    """The same by PyTorch, in fp32 inside: only here to compare with."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float()).to(x.dtype)


class PlainModel(Model):
    def __init__(self, width: int = 256) -> None:
        super().__init__(width)
        self.norm = PlainNorm(width, eps=1e-6)


def add_to_main_grad(parameter: torch.Tensor) -> None:
    """What Megatron's hook does behind every parameter."""
    assert parameter.grad is not None  # its communication in the backward starts from that
    if not parameter.grad_added_to_main_grad or getattr(parameter, "zero_out_wgrad", False):
        parameter.main_grad.add_(parameter.grad)
    parameter.grad = None


def main() -> dict[str, float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = Model().to(device, torch.bfloat16)
    plain = PlainModel().to(device, torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    plain.norm.float()  # its dw is not rounded to bf16 either

    for parameter in (*model.parameters(), *plain.parameters()):
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
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
