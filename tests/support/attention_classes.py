"""Attention as transformers writes it, with norms of heads and the rotary embedding; and what only
looks like it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.support.entry_points import randn
from tests.support.foreign_norms import OffsetRMSNorm, PlainRMSNorm
from tests.support.layer_classes import S
from tests.support.layer_classes import results as results_of

HEADS, KEYS, WIDTH, HIDDEN = 4, 2, 16, 24


def turns(columns: int = WIDTH, batch: int = 1, dtype: torch.dtype = torch.float32) -> Any:
    """Return cos and sin of S tokens."""
    angles = 3 * randn(batch, S, columns // 2, seed=5)
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def results(model: Any, of_turns: Any) -> list[torch.Tensor]:
    """Return the result of attention and its gradients."""
    return results_of(model, of_turns, None, width=HIDDEN)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    one, other = x.chunk(2, -1)
    return torch.cat((-other, one), dim=-1)


def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    turned, columns = [], cos.shape[-1]
    for x in (q, k):
        rest = x[..., columns:] if columns < x.shape[-1] else None
        x = x if rest is None else x[..., :columns]
        y = x * cos + rotate_half(x) * sin
        turned.append(y if rest is None else torch.cat((y, rest), -1))
    return tuple(turned)


def eager_attention_forward(
    module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any
) -> Any:
    key, value = (one.repeat_interleave(HEADS // KEYS, 1) for one in (key, value))
    scores = (query @ key.transpose(2, 3) * scaling).softmax(-1)
    return (scores @ value).transpose(1, 2).contiguous(), scores


def another_attention(*given: Any, **named: Any) -> Any:
    return eager_attention_forward(*given, **named)


ATTENTIONS = {"other": another_attention}


class PlainAttention(nn.Module):
    """Llama's: there are no norms."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.head_dim = SimpleNamespace(_attn_implementation="other"), WIDTH
        self.q_proj = nn.Linear(HIDDEN, HEADS * WIDTH, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KEYS * WIDTH, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KEYS * WIDTH, bias=False)
        self.o_proj = nn.Linear(HEADS * WIDTH, HIDDEN, bias=False)

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Any, attention_mask: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        k = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        cos, sin = position_embeddings
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        attend = ATTENTIONS.get(self.config._attn_implementation, eager_attention_forward)
        y, scores = attend(self, q, k, v, attention_mask, scaling=WIDTH**-0.5)
        return self.o_proj(y.reshape(*hidden_states.shape[:-1], -1)), scores


class Attention(PlainAttention):
    """Qwen's: the norms come before the transpose."""

    norm: Callable[..., nn.Module] = PlainRMSNorm

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = type(self).norm(WIDTH), type(self).norm(WIDTH)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        cos, sin = position_embeddings
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        attend = ATTENTIONS.get(self.config._attn_implementation, eager_attention_forward)
        y, scores = attend(self, q, k, v, attention_mask, scaling=WIDTH**-0.5, **kwargs)
        return self.o_proj(y.reshape(*hidden_states.shape[:-1], -1)), scores


class GatedAttention(Attention):
    """Qwen3-Next's: the projection of the queries has gates, too, and some columns are rotated."""

    norm = OffsetRMSNorm

    def __init__(self) -> None:
        super().__init__()
        self.config.rope_parameters = {"rope_type": "default", "partial_rotary_factor": 0.25}
        self.q_proj = nn.Linear(HIDDEN, 2 * HEADS * WIDTH, bias=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
    ) -> Any:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, gate = torch.chunk(self.q_proj(hidden_states).view(*shape[:-1], 2 * WIDTH), 2, dim=-1)
        q = self.q_norm(q.view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        cos, sin = position_embeddings
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        attend = ATTENTIONS.get(self.config._attn_implementation, eager_attention_forward)
        y, scores = attend(self, q, k, v, attention_mask, scaling=WIDTH**-0.5)
        y = y.reshape(*hidden_states.shape[:-1], -1)
        return self.o_proj(y * gate.reshape(y.shape).sigmoid()), scores


class GemmaAttention(Attention):
    """The norms come behind the transpose, and add 1 to their weight."""

    norm = OffsetRMSNorm

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: torch.Tensor = None,  # type: ignore[assignment]
        attention_mask: torch.Tensor | None = None,
    ) -> Any:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        k = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        q = self.q_norm(q)
        k = self.k_norm(k)
        cos, sin = position_embeddings
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        attend = ATTENTIONS.get(self.config._attn_implementation, eager_attention_forward)
        y, scores = attend(self, q, k, v, attention_mask, scaling=WIDTH**-0.5)
        return self.o_proj(y.reshape(*hidden_states.shape[:-1], -1)), scores


def apply_rotary_in_its_dtype(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    return tuple(y.to(q.dtype) for y in apply_rotary_pos_emb(q, k, cos, sin))


class WholeNormAttention(Attention):
    """OLMo's: the norms are over all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = PlainRMSNorm(HEADS * WIDTH), PlainRMSNorm(KEYS * WIDTH)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states))
        k = self.k_norm(self.k_proj(hidden_states))
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        q, k = q.view(shape).transpose(1, 2), k.view(shape).transpose(1, 2)
        cos, sin = position_embeddings
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        attend = ATTENTIONS.get(self.config._attn_implementation, eager_attention_forward)
        y, scores = attend(self, q, k, v, attention_mask, scaling=WIDTH**-0.5, **kwargs)
        return self.o_proj(y.reshape(*hidden_states.shape[:-1], -1)), scores


class TwiceRotatedAttention(Attention):
    """The second rotation is of what the first one gave."""

    def forward(self, hidden_states: Any, position_embeddings: Any, attention_mask: Any) -> Any:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        cos, sin = position_embeddings
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return self.o_proj(q.transpose(1, 2).flatten(-2)), k


class MixedAttention(Attention):
    """The norms of queries and keys differ."""

    def __init__(self) -> None:
        super().__init__()
        self.k_norm = OffsetRMSNorm(WIDTH)


class ScaledAttention(Attention):
    """Something stands between norm and rotation."""

    def forward(self, hidden_states: Any, position_embeddings: Any, attention_mask: Any) -> Any:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        cos, sin = position_embeddings
        q, k = apply_rotary_pos_emb(q * 0.5, k, cos, sin)
        y, _ = eager_attention_forward(self, q, k, v, attention_mask, WIDTH**-0.5)
        return self.o_proj(y.reshape(*hidden_states.shape[:-1], -1)), None


class QueriesAttention(Attention):
    """Has no norm of keys."""

    def forward(self, hidden_states: Any, position_embeddings: Any, attention_mask: Any) -> Any:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, q, *position_embeddings)
        y, _ = eager_attention_forward(self, q, k, k, attention_mask, WIDTH**-0.5)
        return self.o_proj(y.reshape(*hidden_states.shape[:-1], -1)), None
