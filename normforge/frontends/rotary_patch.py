"""Makes the forwards of attention whose queries and keys `apply_rope` rotates, as in transformers'
Llama."""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import torch

from ..operations import ROPE
from ..serve.options import DTYPES
from ..shape_names import rotation_name
from . import rewritten
from .patch import REMADE, ModuleForward, original_class
from .rope_trial import computes_the_same, keeps_dtype, rotated_columns
from .rotary import RotaryFunctions
from .row_functions import has_kernel


class _Kind(NamedTuple):
    """The rotation of an attention. columns: of a head, those that are rotated; interleaved:
    neighbouring ones are pairs; kept: results are in the dtype of the rows, whatever that of cos
    is."""

    columns: int
    interleaved: bool
    kept: bool


def forward_that_rotates(rotary: RotaryFunctions, module: Any) -> ModuleForward | str:
    """Return the forward of an attention whose queries and keys `apply_rope` rotates, or a sentence
    that says why it is left alone."""
    width = getattr(module, "head_dim", None)
    if type(width) is not int:
        return "it does not say how wide its heads are"
    kind, columns = original_class(type(module)), rotated_columns(module)
    kept = keeps_dtype(rewritten.global_of(kind))
    why = "its forward does not rotate queries and keys once"
    for interleaved in (False, True):
        of = _Kind(columns, interleaved, kept)
        found = _forward_of(rotary, kind, of)
        if found is None:
            return why
        why = "it computes something else than the rotation of halves or of neighbours"
        try:
            same = computes_the_same(module, found, columns)
        except Exception:  # another kind of attention
            return "it raises an error on the CPU with small projections"
        if same:
            return _without_kernels(rotary, module, width, of) or found
    return why


def _without_kernels(rotary: RotaryFunctions, module: Any, width: int, of: _Kind) -> str:
    """Say where a GPU has no kernels for the heads of an attention. Without a GPU nothing is
    known."""
    if not torch.cuda.is_available():
        return ""
    parameter = next(module.parameters(), None)
    dtype = DTYPES.get(torch.bfloat16 if parameter is None else parameter.dtype, "bf16")
    rotation = rotation_name(of.columns, width, of.interleaved)
    asked = (rotary.server(ROPE), 1 << 17, width, dtype, dtype)
    if has_kernel(*asked, offset=False, rotation=rotation):
        return ""
    return f"no kernel of apply_rope serves heads of {width} columns here"


@cache
def _forward_of(rotary: RotaryFunctions, kind: Any, of: _Kind) -> ModuleForward | None:
    """Return the forward of a class whose queries and keys `apply_rope` rotates; None for another
    text."""
    tree, turn = rewritten.of_class(kind), rewritten.global_of(kind)
    if tree is None or turn is None or not rewritten.rotated(tree):
        return None

    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        heads = x.transpose(1, 2)
        return rotary.apply_rope(heads, cos, sin, of.columns, of.interleaved).transpose(1, 2)

    def serve(_: Any, q: Any, k: Any, cos: Any, sin: Any) -> Any:
        """Return q and k (B, H, S, D), rotated."""
        fits = cos.shape[-1] == of.columns and not (cos.requires_grad or sin.requires_grad)
        if not (fits and all(_keeps(x, cos, of) for x in (q, k))):
            return turn(q, k, cos, sin)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    found = rewritten.compiled(kind, tree, {rewritten.SERVED: serve})
    setattr(found, REMADE, partial(_forward_of, rotary, kind, of))
    return found


def _keeps(x: Any, cos: Any, of: _Kind) -> bool:
    """Return True if rotated heads have the dtype of these."""
    return x.dim() == 4 and (of.kept or torch.promote_types(x.dtype, cos.dtype) == x.dtype)
