"""A gated RMSNorm as a module."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ..serve.reference import norm_formula
from ..torch_internals import float_of
from .gated_checks import check_gated, check_sizes, kind_of


class RMSNormGated(torch.nn.Module):
    """A gated RMSNorm with the arguments, the state dict and the results of transformers'
    Qwen3NextRMSNormGated and of mamba_ssm's RMSNormGated. The result has x's dtype.

    Args:
        hidden_size: columns of x.
        eps: added to the mean square.
        group_size: columns that are normalized together, None for all.
        norm_before_gate: whether the norm is that of x, or of x * act(gate).
        activation: "silu" or "sigmoid".
    """

    _package: ClassVar[Any]
    """Every package has a subclass of this class."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str = "silu",
    ) -> None:
        super().__init__()
        self.activation, _ = kind_of(activation, norm_before_gate)
        check_sizes(hidden_size, group_size, eps)
        self.hidden_size, self.group_size, self.eps = hidden_size, group_size, float_of(eps)
        self.norm_before_gate = norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(
        self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The norm alone without a gate."""
        if gate is None:
            check_gated(hidden_states, hidden_states, self.weight, self.eps, self.group_size)
            group = self.group_size or self.hidden_size
            rows, weight = hidden_states.unflatten(-1, (-1, group)), self.weight.view(-1, group)
            return norm_formula(rows, weight, self.eps, 0.0)[0].flatten(-2)
        order = (self.activation, self.norm_before_gate, self.group_size)
        served = self._package.rms_norm_gated
        y: torch.Tensor = served(hidden_states, gate, self.weight, self.eps, *order)
        return y

    def extra_repr(self) -> str:
        group = "" if self.group_size is None else f", group_size={self.group_size}"
        order = "" if self.norm_before_gate else ", norm_before_gate=False"
        gate = "" if self.activation == "silu" else f", activation={self.activation!r}"
        return f"{self.hidden_size}, eps={self.eps}{group}{order}{gate}"
