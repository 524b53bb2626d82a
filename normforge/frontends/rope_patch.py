"""Finds attention that normalizes queries and keys and rotates them, as in transformers' Qwen 3,
Gemma 3 and OLMo 2, and makes the forwards that serve it with `rms_norm_rope`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from ..operations import RMSNORM_ROPE_BACKWARD, RMSNORM_ROPE_FORWARD
from ..serve.options import DTYPES
from ..shape_names import rotation_name
from . import rewritten
from .patch import REMADE, ModuleForward, original_class, replace_forwards, served_by
from .rope import RotatedFunctions
from .row_functions import has_kernel
from .tried import (
    UNTRIED,
    alike,
    are_close,
    eps_of,
    evenly,
    formula_of,
    is_hooked,
    results_of,
    with_its_dtype,
)

ATTENTION = "attention"
"""The name of what is patched here, beside the norms."""
_EAGER = "eager_attention_forward"
_NORMS = ("q_norm", "k_norm")
_SIZES = (1.0, 1e-2, 1e-3, 30.0, 1e6, 7.0)
_FEW, _COLUMNS = (2, 3), 8


class _Kind(NamedTuple):
    """The norms and the rotation of an attention. offset: 1 is added to weights; narrow: the norms'
    results are in x's dtype, whatever that of the weight; kept: those of the rotation are in that
    of its rows, whatever that of cos; columns: of a head, those that are rotated; joined: the norms
    are of all heads together."""

    offset: bool
    narrow: bool
    kept: bool
    columns: int
    joined: bool


def fuse_heads(rotated: RotatedFunctions, model: torch.nn.Module) -> list[str]:
    """Let `rms_norm_rope` serve the queries and keys of a model's attention; the names of the
    modules that it now serves. Each is tried on the CPU, with its norms and small projections, and
    left alone if it computes something else. The log says why (level INFO)."""

    def forward_for(module: Any) -> ModuleForward | str:
        return forward_that_serves(rotated, module)

    def has_norms(module: Any) -> bool:
        return all(isinstance(getattr(module, name, None), torch.nn.Module) for name in _NORMS)

    return replace_forwards(model, ATTENTION, forward_for, has_norms, quiet=True)


def forward_that_serves(rotated: RotatedFunctions, module: Any) -> ModuleForward | str:
    """Return the forward that serves an attention, or a sentence that says why it is left
    alone."""
    width = getattr(module, "head_dim", None)
    if type(width) is not int:
        return "it does not say how wide its heads are"
    norms = [getattr(module, name) for name in _NORMS]
    shapes: list[Any] = [getattr(getattr(norm, "weight", None), "shape", ()) for norm in norms]
    if any(len(shape) != 1 or shape[0] % width for shape in shapes):
        return "its norms are neither those of single heads nor those of all heads together"
    formula, other = map(formula_of, norms)
    if formula is None or formula == UNTRIED or formula != other:
        return "its norms do not both compute xhat * w or xhat * (1 + w)"
    patched, of_keys = map(served_by, norms)
    if patched is None or patched is not of_keys:
        return "its norms were not both patched alike"
    kind: Any = type(module)
    of = _Kind(
        offset=formula == "gemma",
        narrow=all(with_its_dtype(norm, formula) == formula for norm in norms),
        kept=_keeps_dtype(rewritten.global_of(original_class(kind))),
        columns=_rotated_columns(module),
        joined=shapes != [(width,)] * 2,
    )
    if of.joined and of.columns != width:
        return "it normalizes all heads together, and rotates a part of their columns"
    for weight in {len(norm.weight): norm.weight for norm in norms}.values():
        if missing := _without_kernels(rotated, weight, width, of):
            return missing
    found = _forward_of(rotated, kind, of, patched)
    if found is None:
        return "its forward is not q_norm, k_norm and then apply_rotary_pos_emb"
    try:
        same = _computes_the_same(module, found, of.columns)
    except Exception:  # another kind of attention
        return "it raises an error on the CPU with small projections"
    return found if same else "it computes something else than norm and rotation of its halves"


def _rotated_columns(module: Any) -> int:
    """Return how many columns of each head the model of an attention rotates, as its config says.
    (Calls of another number run as before.)"""
    config = getattr(module, "config", None)
    parameters = getattr(config, "rope_parameters", None)
    said = parameters.get("partial_rotary_factor") if isinstance(parameters, Mapping) else None
    said = getattr(config, "partial_rotary_factor", None) if said is None else said
    return int(module.head_dim * said) if isinstance(said, float) else module.head_dim


def _keeps_dtype(turn: Any) -> bool:
    """Return True if a rotation has results in the dtype of its rows, whatever that of cos is."""
    x, ones = torch.ones(1, 1, 1, 2, dtype=torch.bfloat16), torch.ones(1, 1, 2)
    try:
        return all(y.dtype == x.dtype for y in turn(x, x, ones, ones))
    except Exception:  # it rotates something else
        return False


def _without_kernels(rotated: RotatedFunctions, weight: torch.Tensor, width: int, of: _Kind) -> str:
    """Say where a GPU has no kernels for rows like those of a norm, of heads of such a width: they
    are better with the norm's then. Without a GPU nothing is known."""
    if not torch.cuda.is_available():
        return ""
    dtype = DTYPES.get(weight.dtype, "bf16")
    rotation = rotation_name(of.columns, len(weight), joined=of.joined)
    for operation in (RMSNORM_ROPE_FORWARD, RMSNORM_ROPE_BACKWARD):
        asked = (rotated.server(operation), 1 << 17, len(weight), dtype, dtype)
        if not has_kernel(*asked, offset=of.offset, rotation=rotation):
            some = f", {of.columns} of them rotated," if of.columns != width else ""
            rows = f"rows of {len(weight)} columns in " if of.joined else ""
            return f"no kernel of rms_norm_rope serves {rows}heads of {width} columns{some} here"
    return ""


@cache
def _forward_of(
    rotated: RotatedFunctions, kind: Any, of: _Kind, patched: ModuleForward
) -> ModuleForward | None:
    """Return the forward of a class whose queries and keys `rms_norm_rope` serves; None for another
    text. patched: what serves the norms alone. Others, which took their place, are called."""
    kind = original_class(kind)
    tree = rewritten.of_class(kind)
    turn = rewritten.global_of(kind)
    if tree is None or turn is None or not rewritten.heads_rotated(tree):
        return None

    def by_rows(x: torch.Tensor, serve: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        if not of.joined:
            return serve(x.transpose(1, 2)).transpose(1, 2)
        y = serve(x.transpose(1, 2).flatten(-2))
        return y.unflatten(-1, (x.shape[1], x.shape[3])).transpose(1, 2)

    def heads(norm: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        eps: Any = eps_of(norm)  # _fits has seen it
        # Tracers have sizes that are no ints.
        how: Any = {"heads": int(x.shape[1])} if of.joined else {"rotary_dim": of.columns}
        how["weight_offset"] = float(of.offset)

        def serve(rows: torch.Tensor) -> torch.Tensor:
            return rotated.rms_norm_rope(rows, norm.weight, cos, sin, eps, **how)

        return by_rows(x, serve)

    def serve(self: Any, q: Any, k: Any, cos: Any, sin: Any) -> Any:
        """Return q and k (B, H, S, D), normalized and rotated."""
        fits = cos.shape[-1] == of.columns and not (cos.requires_grad or sin.requires_grad)
        fits = fits and served_by(self.q_norm) is patched is served_by(self.k_norm)
        fits = fits and _fits(self.q_norm, q, cos, of)
        if not fits or not _fits(self.k_norm, k, cos, of):
            if of.joined:
                return turn(by_rows(q, self.q_norm), by_rows(k, self.k_norm), cos, sin)
            return turn(self.q_norm(q), self.k_norm(k), cos, sin)
        return heads(self.q_norm, q, cos, sin), heads(self.k_norm, k, cos, sin)

    found = rewritten.compiled(kind, tree, {rewritten.SERVED: serve})
    made = getattr(patched, REMADE)
    setattr(found, REMADE, partial(_remade, rotated, kind, of, made))
    return found


def _remade(*given: Any) -> ModuleForward | None:
    *others, made = given
    return _forward_of(*others, made())


def _fits(norm: Any, x: Any, cos: Any, of: _Kind) -> bool:
    """Return True if the result has x's dtype, and a call of the norm does nothing else: by hooks,
    for example, tensor parallelism sums the gradients of its weight."""
    if x.dim() != 4 or eps_of(norm) is None or is_hooked(norm):
        return False
    normed = x.dtype if of.narrow else torch.promote_types(x.dtype, norm.weight.dtype)
    return (normed if of.kept else torch.promote_types(normed, cos.dtype)) == x.dtype


# ---- Tried on the CPU ----------------------------------------------------------------------------


def _computes_the_same(module: Any, fused: Any, columns: int) -> bool:
    """Return True if a forward has the results and gradients of that of a module, with small
    projections and attention that only adds heads up."""
    kind = original_class(type(module))
    original = rewritten.plain_forward(kind)
    scope = {**original.__globals__, _EAGER: _added_up}
    theirs, ours = (rewritten.among(one, scope, original) for one in (original, fused))
    of_queries, of_keys = (len(getattr(module, name).weight) for name in _NORMS)
    weights = [evenly(-1, 2, of_queries), evenly(2, -0.5, of_keys)]
    projections = {
        name: _projection(child.out_features, seed)
        for seed, (name, child) in enumerate(module.named_children())
        if name.endswith("_proj") and name != "o_proj"
    }
    others = {**projections, "o_proj": torch.nn.Identity()}
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
                for name, scale in zip(_NORMS, scales, strict=True)
            }
            one = alike(module, {}, {**module._modules, **others, **norms})
            one.__dict__ |= {"config": config, "training": False}
            given = {"position_embeddings": (angles.cos(), angles.sin()), "attention_mask": None}
            y: torch.Tensor = forward(one, hidden_states=x, **given)[0]
            return y

        return results_of(of, hidden, *weights)

    return all(are_close(run(ours, batch), run(theirs, batch), hidden) for batch in (1, _FEW[0]))


def _projection(columns: int, seed: int) -> torch.nn.Linear:
    made = torch.nn.Linear(_COLUMNS, columns, bias=False)
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
