"""An override module for torchtitan: its RMSNorm by the kernels of `normforge`.

    torchtitan_train ... --override.imports normforge.torchtitan.rms_norm

replaces every `RMSNorm` in the config of the trainer. Parameters, state dicts, initialisation and
sharding stay as they are. Written for torchtitan 0.3, whose overrides are described in its
torchtitan/overrides/README.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.config import derive, override
from torchtitan.models.common.nn_modules import RMSNorm as TorchtitanNorm

from normforge import rms_norm as norm


class RMSNorm(TorchtitanNorm):
    """torchtitan's RMSNorm, with `normforge.rms_norm` in the place of PyTorch's function."""

    @dataclass(kw_only=True, slots=True)
    class Config(TorchtitanNorm.Config):
        """The fields of torchtitan's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = norm(x, self.weight, self.eps)
        return y


@override(
    target=TorchtitanNorm.Config, exact=True, description="RMSNorm by the kernels of normforge"
)
def rms_norm(config: Any) -> RMSNorm.Config:
    """The config of the norm that takes the place of one of torchtitan's."""
    found: RMSNorm.Config = derive(config, RMSNorm.Config)
    return found
