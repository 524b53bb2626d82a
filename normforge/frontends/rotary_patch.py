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
    if kept is None:
        return "its rotation gives other dtypes than those of its rows and of cos"
    why = "its forward does not rotate queries and keys once"
    for interleaved in (False, True):
        of, tried = _Kind(columns, interleaved, kept), _Tried(rotary)
        found = _forward_of.__wrapped__(tried, kind, of)
        if found is None:
            return why
        why = "it computes something else than the rotation of halves or of neighbours"
        try:
            same = computes_the_same(module, found, columns)
        except Exception:  # another kind of attention
            return "it raises an error on the CPU with small projections"
        if same and tried.widths:
            missing = _without_kernels(rotary, module, max(tried.widths), of)
            return missing or _forward_of(rotary, kind, of)
    return why


class _Tried:
    """Stands in for the functions in a trial, and keeps how wide the heads of calls are: some
    attention gives those columns alone that are rotated."""

    def __init__(self, rotary: RotaryFunctions) -> None:
        self._rotary, self.widths = rotary, set[int]()

    def apply_rope(self, x: torch.Tensor, *given: Any) -> torch.Tensor:
        self.widths.add(x.shape[-1])
        return self._rotary.apply_rope(x, *given)


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
def _forward_of(rotary: Any, kind: Any, of: _Kind) -> Any:
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
        if not (fits and all(_fits(x, cos, of) for x in (q, k))):
            return turn(q, k, cos, sin)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    found = rewritten.compiled(kind, tree, {rewritten.SERVED: serve})
    setattr(found, REMADE, partial(_forward_of, rotary, kind, of))
    return found


def _fits(x: Any, cos: Any, of: _Kind) -> bool:
    """Return True if cos is of the tokens of heads (B, H, S, D), and rotated ones have the dtype of
    these."""
    if x.dim() != 4 or cos.dim() not in (2, 3):
        return False
    batch, tokens = cos.shape[0] if cos.dim() == 3 else 1, cos.shape[-2]
    if not (tokens == 1 or tokens == x.shape[2]) or not (batch == 1 or batch == x.shape[0]):
        return False  # `in` takes no symbolic sizes
    return of.kept or torch.promote_types(x.dtype, cos.dtype) == x.dtype
