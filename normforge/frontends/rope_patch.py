"""Finds attention that normalizes queries and keys and rotates them, as in transformers' Qwen 3,
Gemma 3 and OLMo 2, and makes the forwards that serve it with `rms_norm_rope`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from ..operations import RMSNORM_ROPE_BACKWARD, RMSNORM_ROPE_FORWARD
from ..serve.options import DTYPES
from ..shape_names import rotation_name
from . import rewritten
from .patch import REMADE, ModuleForward, original_class, replace_forwards, served_by
from .rope import RotatedFunctions
from .rope_trial import computes_the_same, keeps_dtype, rotated_columns
from .rotary_modules import with_other_halves
from .rotary_patch import forward_that_rotates
from .row_functions import has_kernel
from .tried import UNTRIED, eps_of, formula_of, is_hooked, with_its_dtype

_log = logging.getLogger(__name__)
ATTENTION = "attention"
"""The name of what is patched here, beside the norms."""
_NORMS = ("q_norm", "k_norm")


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
    """Let `rms_norm_rope` serve the queries and keys of a model's attention, or `apply_rope` where
    they have no norms, or others; the names of the modules that are now served. Each is tried on
    the CPU, with its norms and small projections, and left alone if it computes something else. The
    log says why (level INFO)."""

    odd = with_other_halves(model)

    def forward_for(module: Any) -> ModuleForward | str:
        if odd:
            return f"{odd} gives cos and sin whose halves differ"
        if not _has_norms(module):
            return forward_that_rotates(rotated, module)
        found = forward_that_serves(rotated, module)
        if not isinstance(found, str):
            return found
        alone = forward_that_rotates(rotated, module)
        if isinstance(alone, str):
            return found
        kind = original_class(type(module)).__name__
        _log.info("patch joins no norms with the rotation in a %s: %s", kind, found)
        return alone

    def may_be_one(module: Any) -> bool:
        return _has_norms(module) or rewritten.rotates(original_class(type(module)))

    return replace_forwards(model, ATTENTION, forward_for, may_be_one, quiet=True)


def _has_norms(module: Any) -> bool:
    return all(isinstance(getattr(module, name, None), torch.nn.Module) for name in _NORMS)


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
    kept = keeps_dtype(rewritten.global_of(original_class(kind)))
    if kept is None:
        return "its rotation gives other dtypes than those of its rows and of cos"
    of = _Kind(
        offset=formula == "gemma",
        narrow=all(with_its_dtype(norm, formula) == formula for norm in norms),
        kept=kept,
        columns=rotated_columns(module),
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
        same = computes_the_same(module, found, of.columns, _NORMS)
    except Exception:  # another kind of attention
        return "it raises an error on the CPU with small projections"
    return found if same else "it computes something else than norm and rotation of its halves"


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
