"""Small layers as models of transformers have them."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.support.foreign_norms import OffsetRMSNorm, PlainRMSNorm

N = 16
"""The columns of their rows."""

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
