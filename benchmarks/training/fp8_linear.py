"""Linear layers in FP8 as in DeepSeek-V3: what is multiplied with a weight, and the gradient of the
product, are quantized in blocks of 128 columns, weights in blocks of 128x128. The gradient of the
weight is a product in bf16."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from normforge.operations.rmsnorm_quantized import LARGEST

BLOCK = 128


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows (M, N) in e4m3, and the scale of each block of 128 columns in fp32, (M, N /
    128)."""
    blocks = rows.float().unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-12) / LARGEST
    return (blocks / scales).to(torch.float8_e4m3fn).flatten(-2), scales.squeeze(-1)


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight (out, in) in e4m3, and the scale of each block of 128x128 in fp32."""
    out, columns = weight.shape
    blocks = weight.float().view(out // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scales = blocks.abs().amax((1, 3), keepdim=True).clamp_min(1e-12) / LARGEST
    narrow = (blocks / scales).to(torch.float8_e4m3fn).view(out, columns)
    return narrow, scales.view(out // BLOCK, columns // BLOCK)


def product(
    rows: tuple[torch.Tensor, torch.Tensor], weight: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Return rows @ weight.T in bf16, by PyTorch's product of blocks, which takes the scales of
    rows column by column."""
    (x8, x_scales), (w8, w_scales) = rows, weight
    by_columns = x_scales.t().contiguous().t()
    return torch._scaled_mm(x8, w8.t(), by_columns, w_scales.t(), out_dtype=torch.bfloat16)


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, *narrow: Any) -> Any:
        ctx.save_for_backward(x, *narrow[2:])
        return product(quantize(x), narrow[:2])

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        (dy,) = given
        x, *narrow = ctx.saved_tensors
        dx = product(quantize(dy), (narrow[0], narrow[1]))
        return dx, dy.t() @ x, None, None, None, None


class BlockLinear(nn.Module):
    """A linear layer without bias that multiplies in FP8. The weight is quantized once, when this
    is made: the time of that is the optimizer's."""

    def __init__(self, of: nn.Linear) -> None:
        super().__init__()
        self.weight = of.weight
        for name, weight in (("there", of.weight.detach()), ("back", of.weight.detach().t())):
            for what, tensor in zip(("w8", "scales"), quantize_weight(weight), strict=True):
                self.register_buffer(f"{what}_{name}", tensor.contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T of (..., in), as (..., out) in bf16."""
        narrow = (self.w8_there, self.scales_there, self.w8_back, self.scales_back)
        y: torch.Tensor = _Multiply.apply(x.flatten(0, -2), self.weight, *narrow)
        return y.unflatten(0, x.shape[:-1])


def multiply_in_fp8(module: nn.Module) -> nn.Module:
    """Let the linear layers of a module multiply in FP8."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, BlockLinear(child))
        else:
            multiply_in_fp8(child)
    return module
