"""Small layers as models of transformers have them, what they compute, and models themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.entry_points import filled, leaf, randn
from tests.support.foreign_norms import OffsetRMSNorm, PlainRMSNorm

B, S, N = 2, 5, 16
"""The shape of their rows."""

SMALL = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
"""Sizes of small models of transformers."""


def model_of(name: str, **sizes: Any) -> Any:
    """A small causal model of transformers, whose parameters are normal numbers."""
    transformers: Any = pytest.importorskip("transformers", reason="needs transformers")
    kind = f"{name}Text" if name in ("Gemma3", "Llama4", "Qwen3_5") else name
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **sizes})
    return filled(getattr(transformers, f"{name}ForCausalLM")(config))


def step(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """The loss and the gradients of a model of transformers."""
    loss = model(ids, labels=ids, use_cache=False).loss
    return [loss, *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)]


def first(y: Any) -> torch.Tensor:
    result: torch.Tensor = y[0] if isinstance(y, tuple) else y
    return result


def results(
    model: Any, *given: Any, dtype: torch.dtype = torch.float32, width: int = N, **named: Any
) -> list[torch.Tensor]:
    """The result of a layer and the gradients that there are, of its rows and parameters."""
    x = leaf(B, S, width, dtype=dtype, seed=7)
    y = first(model(x, *given, **named))
    dy = randn(*y.shape, dtype=y.dtype, seed=8)
    found = torch.autograd.grad(y, [x, *model.parameters()], dy, allow_unused=True)
    return [y, *(one for one in found if one is not None)]


def check(found: list[torch.Tensor], wanted: list[torch.Tensor], tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


class SelfAttention(nn.Linear):
    def __init__(self) -> None:
        super().__init__(N, N)

    def forward(self, hidden_states: Any, **_: Any) -> Any:  # type: ignore[override]
        return super().forward(hidden_states).sin(), None


class Layer(nn.Module):
    """OLMo's, whose norms are behind attention and MLP."""

    norm: Any = PlainRMSNorm

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = SelfAttention(), nn.Linear(N, N)
        self.norm1, self.norm2 = type(self).norm(N), type(self).norm(N)

    def forward(self, hidden_states: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        residual = hidden_states
        hidden_states, _ = self.self_attn(hidden_states=hidden_states, **kwargs)
        hidden_states = self.norm1(hidden_states)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.mlp(hidden_states)
        hidden_states = self.norm2(hidden_states)
        hidden_states = hidden_states + residual
        return hidden_states


class GemmaLayer(Layer):
    """Has norms before attention and MLP as well, and another class."""

    norm = OffsetRMSNorm

    def __init__(self) -> None:
        super().__init__()
        self.norm3, self.norm4 = OffsetRMSNorm(N), OffsetRMSNorm(N)

    def forward(self, hidden_states: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        residual = hidden_states
        hidden_states = self.norm3(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states, **kwargs)
        hidden_states = self.norm1(hidden_states)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.norm4(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = self.norm2(hidden_states)
        hidden_states = residual + hidden_states
        return (hidden_states,)


class LlamaLayer(Layer):
    """Llama's, whose norms are before attention and MLP, and their results are added."""

    def forward(self, hidden_states: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        residual = hidden_states
        hidden_states = self.norm1(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.norm2(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states


class OffsetLayer(LlamaLayer):
    """Gemma's first."""

    norm = OffsetRMSNorm


class OtherNamesLayer(LlamaLayer):
    """Keeps the sum under its own name."""

    def forward(self, hidden_states: Any, attention_mask: Any = None, **_: Any) -> Any:
        rows = hidden_states
        y = self.norm1(hidden_states)
        y, _ = self.self_attn(y)
        stream = y * 0.5 + rows
        y = self.norm2(stream)
        return stream + self.mlp(y)
