"""RMSNorms as models have them in classes of their own, and what only looks like one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class PlainRMSNorm(nn.Module):
    """The norm is rounded before the product, as in the files of Llama and Qwen."""

    def __init__(self, width: int = 16, eps: float = 1e-4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden_states.dtype)


class OffsetRMSNorm(nn.Module):
    """The weight is stored minus one, as in the files of Gemma."""

    def __init__(self, width: int = 16, eps: float = 1e-4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).type_as(x)


class ForgetfulRMSNorm(PlainRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True)))


class CentredRMSNorm(PlainRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


class HiddenEpsRMSNorm(PlainRMSNorm):
    """A norm with another eps than the one under the usual name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 3e-4)


class ColumnRMSNorm(PlainRMSNorm):
    """An RMSNorm over the second dimension, which is the last one of a matrix."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rstd = torch.rsqrt(x.square().mean(1, keepdim=True) + self.variance_epsilon)
        return self.weight * (x * rstd)


class MatrixRMSNorm(PlainRMSNorm):
    """An RMSNorm over all dimensions but the first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        over = tuple(range(1, x.dim()))
        rstd = torch.rsqrt(x.square().mean(over, keepdim=True) + self.variance_epsilon)
        return self.weight * (x * rstd)


class ChannelRMSNorm(PlainRMSNorm):
    """Takes four dimensions for channels in the second."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() < 4:
            return super().forward(x)
        return x * torch.rsqrt(x.square().mean(1, keepdim=True) + self.variance_epsilon)


class DetachedStatisticRMSNorm(PlainRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (x * rstd.detach())


class DetachedWeightRMSNorm(PlainRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight.detach() * (x * rstd)


class ClampedRMSNorm(PlainRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.clamp(-100, 100))


class ClampedStatisticRMSNorm(PlainRMSNorm):
    """A floor for the mean square, instead of the eps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.square().mean(-1, keepdim=True).clamp(self.variance_epsilon)
        return self.weight * (x * torch.rsqrt(mean))


class TwiceRMSNorm(PlainRMSNorm):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), x


class NarrowRMSNorm(PlainRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).bfloat16()


class PickyRMSNorm(PlainRMSNorm):
    """A norm that refuses what is not three-dimensional."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() != 3:
            raise ValueError("x must have three dimensions")
        return super().forward(x)


class GatedRMSNorm(PlainRMSNorm):
    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x) if gate is None else super().forward(x) * gate


class BiasedRMSNorm(PlainRMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(16))
