"""Transformer blocks with the widths of published models, whose norms are a function to choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import linear, scaled_dot_product_attention, silu

EPS = 1e-6
Norm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A norm: gives y of x (..., N) and the weight (N,)."""
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Widths:
    """The widths of one model. head_norm: queries and keys are normalised, as in Qwen 3."""

    title: str
    hidden: int
    heads: int
    kv_heads: int
    feed_forward: int
    head_norm: bool = False
    head: int = 128


MODELS = {
    "llama3_8b": Widths("Llama 3 8B", 4096, 32, 8, 14336),
    "qwen3_2b": Widths("Qwen 3 1.7B", 2048, 16, 8, 6144, head_norm=True),
}


def make_weights(widths: Widths, device: torch.device) -> Weights:
    """Make the weights of one block, in bf16; norms' are about 1."""
    hidden, head = widths.hidden, widths.head
    query, key = widths.heads * head, widths.kv_heads * head
    shapes = {
        "qkv": (query + 2 * key, hidden),
        "out": (hidden, query),
        "gate_up": (2 * widths.feed_forward, hidden),
        "down": (hidden, widths.feed_forward),
    }
    weights = {
        name: torch.randn(shape, device=device) * shape[1] ** -0.5 for name, shape in shapes.items()
    }
    norms = {"norm1": hidden, "norm2": hidden}
    if widths.head_norm:
        norms |= {"query_norm": head, "key_norm": head}
    weights |= {name: 1 + 0.1 * torch.randn(N, device=device) for name, N in norms.items()}
    return {name: w.to(torch.bfloat16).requires_grad_() for name, w in weights.items()}


def rotation(length: int, head: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the rotary embedding, (length, head)."""
    rates = 5e5 ** (-torch.arange(0, head, 2, device=device) / head)
    angles = torch.outer(torch.arange(length, device=device), rates).repeat(1, 2)
    return angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x (batch, heads, length, head)."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def block(
    x: torch.Tensor, w: Weights, cos: torch.Tensor, sin: torch.Tensor, *, widths: Widths, norm: Norm
) -> torch.Tensor:
    """A pre-norm block with causal attention and a gated feed-forward network. x: (batch, length,
    hidden), and so is the result."""
    batch, length, _ = x.shape
    query, key = widths.heads * widths.head, widths.kv_heads * widths.head
    parts = linear(norm(x, w["norm1"]), w["qkv"]).split([query, key, key], dim=-1)
    q, k, v = (part.view(batch, length, -1, widths.head) for part in parts)
    if widths.head_norm:
        q, k = norm(q, w["query_norm"]), norm(k, w["key_norm"])
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    mixed = scaled_dot_product_attention(
        _rotated(q, cos, sin), _rotated(k, cos, sin), v, is_causal=True, enable_gqa=True
    )
    x = x + linear(mixed.transpose(1, 2).reshape(batch, length, query), w["out"])
    gate, up = linear(norm(x, w["norm2"]), w["gate_up"]).chunk(2, dim=-1)
    return x + linear(silu(gate) * up, w["down"])
