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


class CentredRMSNorm(PlainRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


class ColumnRMSNorm(PlainRMSNorm):
    """An RMSNorm over the second dimension, which is the last one of a matrix."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * rstd_of(self, x, 1))


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


def rstd_of(norm: Any, x: torch.Tensor, over: Any = -1) -> torch.Tensor:
    return torch.rsqrt(x.square().mean(over, keepdim=True) + norm.variance_epsilon)


def plain(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return PlainRMSNorm.forward(norm, x)


def by_channels(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """Take four dimensions for channels in the second."""
    return plain(norm, x) if x.dim() < 4 else x * rstd_of(norm, x, 1)


def with_a_floor(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute the norm with a floor for the mean square, instead of the eps."""
    mean = x.square().mean(-1, keepdim=True).clamp(norm.variance_epsilon)
    return norm.weight * (x * torch.rsqrt(mean))


def made(base: type, name: str, compute: Any) -> Any:
    """A class of norms whose forward is `compute`, of the norm and its rows."""

    def forward(self: Any, x: torch.Tensor) -> Any:
        return compute(self, x)

    return type(name, (base,), {"forward": forward})


OTHERS: dict[str, Any] = {
    "Forgetful": lambda norm, x: norm.weight * x * torch.rsqrt(x.square().mean(-1, True)),
    "HiddenEps": lambda norm, x: norm.weight * x * torch.rsqrt(x.square().mean(-1, True) + 3e-4),
    "Twice": lambda norm, x: (plain(norm, x), x),
    "Narrow": lambda norm, x: plain(norm, x).bfloat16(),
    "Matrix": lambda norm, x: norm.weight * (x * rstd_of(norm, x, tuple(range(1, x.dim())))),
    "Channel": by_channels,
    "Clamped": lambda norm, x: plain(norm, x.clamp(-100, 100)),
    "ClampedResult": lambda norm, x: plain(norm, x).clamp(-100, 100),
    "OtherInEvaluation": lambda norm, x: plain(norm, x) * (2 - norm.training),
    "ClampedStatistic": with_a_floor,
    "DetachedStatistic": lambda norm, x: norm.weight * (x * rstd_of(norm, x).detach()),
    "DetachedWeight": lambda norm, x: norm.weight.detach() * (x * rstd_of(norm, x)),
}
OTHER_NORMS = [
    *(made(PlainRMSNorm, f"{name}RMSNorm", compute) for name, compute in OTHERS.items()),
    *(CentredRMSNorm, ColumnRMSNorm, GatedRMSNorm, BiasedRMSNorm),
]
"""Norms that only look like an RMSNorm."""
