"""Tries the forward of an attention that was rewritten on the CPU, beside its own, with small
projections and something simple in the place of attention."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from . import rewritten
from .patch import original_class
from .tried import alike, are_close, evenly, results_of

_EAGER = "eager_attention_forward"
_SIZES = (1.0, 1e-2, 1e-3, 30.0, 1e6, 7.0)
_FEW, _COLUMNS = (2, 3), 8


def computes_the_same(
    module: Any, fused: Any, columns: int, norms_of_heads: Sequence[str] = ()
) -> bool:
    """Return True if a forward has the results and gradients of that of a module, with small
    projections and attention that only adds heads up. columns: of a head, those that are rotated;
    norms_of_heads: the names of norms whose weights have gradients."""
    kind = original_class(type(module))
    original = rewritten.plain_forward(kind)
    scope = {**original.__globals__, _EAGER: _added_up}
    theirs, ours = (rewritten.among(one, scope, original) for one in (original, fused))
    ends = zip(norms_of_heads, ((-1.0, 2.0), (2.0, -0.5)), strict=False)
    weights = [evenly(*span, len(getattr(module, name).weight)) for name, span in ends]
    projections = {
        name: _projection(child.out_features, seed)
        for seed, (name, child) in enumerate(module.named_children())
        if name.endswith("_proj") and name != "o_proj"
    }
    others = {
        name: copy.deepcopy(child).to("cpu", torch.float32)
        for name, child in module.named_children()
        if name not in projections and name not in (*norms_of_heads, "o_proj")
    }
    others |= {**projections, "o_proj": torch.nn.Identity()}
    hidden = evenly(-1, 3, 6 * _COLUMNS).sin().view(*_FEW, _COLUMNS)
    hidden = hidden * torch.tensor(_SIZES).view(*_FEW, 1)
    config = copy.deepcopy(module.config)
    config._attn_implementation = "eager"

    def run(forward: Callable[..., Any], batch: int) -> Any:
        angles = evenly(0.1, 5, batch * _FEW[1] * (columns // 2)).view(batch, _FEW[1], -1)
        angles = torch.cat((angles, angles), -1)

        def of(x: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
            norms = {
                name: alike(getattr(module, name), {"weight": scale})
                for name, scale in zip(norms_of_heads, scales, strict=True)
            }
            one = alike(module, {}, {**module._modules, **others, **norms})
            one.__dict__ |= {"config": config, "training": False}
            given = {"position_embeddings": (angles.cos(), angles.sin()), "attention_mask": None}
            y: torch.Tensor = forward(one, hidden_states=x, **given)[0]
            return y

        return results_of(of, hidden, *weights)

    return all(are_close(run(ours, batch), run(theirs, batch), hidden) for batch in (1, _FEW[0]))


def _projection(columns: int, seed: int) -> torch.nn.Linear:
    made = torch.nn.Linear(_COLUMNS, columns, bias=False, device="meta")  # nothing is drawn
    made.weight = torch.nn.Parameter(
        torch.randn(columns, _COLUMNS, generator=torch.Generator().manual_seed(seed))
    )
    return made


def _added_up(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """Stand in for attention: each head of q has a part of its k and v."""
    times = query.shape[1] // key.shape[1]
    others = 0.5 * key + 0.01 * value
    return (query + others.repeat_interleave(times, 1)).transpose(1, 2), None


def rotated_columns(module: Any) -> int:
    """Return how many columns of each head the model of an attention rotates, as its config says.
    (Calls of another number run as before.)"""
    config = getattr(module, "config", None)
    parameters = getattr(config, "rope_parameters", None)
    said = parameters.get("partial_rotary_factor") if isinstance(parameters, Mapping) else None
    said = getattr(config, "partial_rotary_factor", None) if said is None else said
    return int(module.head_dim * said) if isinstance(said, float) else module.head_dim


def keeps_dtype(turn: Any) -> bool | None:
    """Return True if a rotation has results in the dtype of its rows, whatever that of cos is, and
    False if they are as wide as both; None for neither."""
    x, ones = torch.ones(1, 1, 1, 2, dtype=torch.bfloat16), torch.ones(1, 1, 2)
    try:
        narrow, beside_wide = (
            {y.dtype for y in turn(x, x, cos, cos)} for cos in (ones.bfloat16(), ones)
        )
    except Exception:  # it rotates something else
        return False
    known = narrow == {torch.bfloat16} and len(beside_wide) == 1
    return beside_wide == narrow if known else None
