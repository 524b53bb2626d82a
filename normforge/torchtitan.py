"""An override module for torchtitan: its RMSNorm by the kernels of `normforge`.

    torchtitan_train ... --override.imports normforge.torchtitan.rms_norm

replaces every `RMSNorm` in the config of the trainer. Parameters, state dicts, initialisation and
sharding stay as they are. With `debug.spmd_typechecking`, a norm has the types of PyTorch's, unless
`use_native()` was called. Written for torchtitan 0.3, whose overrides are described in its
torchtitan/overrides/README.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.config import derive, override
from torchtitan.models.common.nn_modules import RMSNorm as TorchtitanNorm

from normforge import rms_norm as norm
from normforge.frontends.nodes import EagerNorm

try:
    from spmd_types import register_decomposition
except ImportError:  # nobody checks types
    register_decomposition = None


class NormforgeRMSNorm(TorchtitanNorm):
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
def rms_norm(config: Any) -> NormforgeRMSNorm.Config:
    """The config of the norm that takes the place of one of torchtitan's."""
    found: NormforgeRMSNorm.Config = derive(config, NormforgeRMSNorm.Config)
    return found


def _pytorchs(
    _: Any, x: torch.Tensor, weight: torch.Tensor | None, eps: float | None, __: float
) -> torch.Tensor:
    """Compute a node of `rms_norm`, by the function that the checker of types knows."""
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


if register_decomposition is not None:
    register_decomposition(EagerNorm, _pytorchs)
