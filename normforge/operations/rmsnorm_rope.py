"""RMSNorm of heads and the rotary embedding behind it, forward and backward, as in Qwen 3 and Gemma
3 (Su et al., "RoFormer", 2021; rotate_half as in GPT-NeoX): y = n * cos + rotate_half(n) *
sin with n = norm(x) * w.

A kernel of the backward computes rstd again from the rows, so that a forward saves nothing but its
arguments.
"""

from __future__ import annotations

from typing import Any

from .gated_rmsnorm_backward import EPS, norm_terms
from .row_operation import RowOperation, Terms
from .signature import Signature
from .tensor import columns, group, number, rows, rows_out, sums


def _halves(n: Any) -> tuple[Any, Any]:
    half = n.shape[-1] // 2
    return n[..., :half], n[..., half:]


def _joined(first: Any, second: Any) -> Any:
    import torch

    return torch.cat((first, second), -1)


def rotated(n: Any, cos: Any, sin: Any) -> Any:
    """Return n * cos + rotate_half(n) * sin. cos, sin: of the first half of the columns, which are
    those of the second, too."""
    first, second = _halves(n)
    return _joined(first * cos - second * sin, second * cos + first * sin)


def rmsnorm_rope(x: Any, weight: Any, cos: Any, sin: Any, eps: float) -> Any:
    """Return y in the dtype of the arguments, which is that of the arithmetic. Differentiable."""
    n = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
    return rotated(n, cos, sin)


def _forward_terms(x: Any, weight: Any, cos: Any, sin: Any, eps: float) -> Terms:
    """Return the terms of y: those with cos, and those with sin."""
    n = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
    first, second = _halves(n)
    return {"y": (_joined(first * cos, second * cos), _joined(-second * sin, first * sin))}


def _backward_terms(x: Any, dy: Any, weight: Any, cos: Any, sin: Any, eps: float) -> Terms:
    """Return the terms of the gradients: those of RMSNorm with dn = dy * cos + (dy * sin of the
    second half in front of -(dy * sin) of the first) in place of dy."""
    first, second = _halves(dy)
    parts = (_joined(first * cos, second * cos), _joined(second * sin, -first * sin))
    found = [norm_terms(x, part, weight, eps) for part in parts]
    normalized = found[0][0]
    dx = tuple(term for _, terms in found for term in terms)
    return {"dx": dx, "dw": ((parts[0] + parts[1]) * normalized,)}


def _forward(x: Any, weight: Any) -> tuple[Any, dict[str, Any]]:
    """The forward of rows of one group, with some rotation."""
    import torch

    angles = torch.arange(x.shape[-1] // 2, dtype=x.dtype, device=x.device)[None] + 0.5
    cos, sin = angles.cos(), angles.sin()
    saved = {"x": x, "weight": weight, "cos": cos, "sin": sin, "eps": EPS}
    return rmsnorm_rope(x, weight, cos, sin, EPS), saved


RMSNORM_ROPE_FORWARD = RowOperation(
    name="rmsnorm_rope_forward",
    signature=Signature(
        rows("x", paired=True),
        columns("weight", paired=True),
        group("cos"),
        group("sin"),
        rows_out("y"),
        number("eps"),
        row_sums=1,
        summed=True,
    ),
    terms=_forward_terms,
)
RMSNORM_ROPE_BACKWARD = RowOperation(
    name="rmsnorm_rope_backward",
    signature=Signature(
        rows("x"),
        rows("dy", paired=True),
        columns("weight"),
        group("cos"),
        group("sin"),
        rows_out("dx", packed=True),
        sums("dw"),
        number("eps"),
        row_sums=2,
        summed=True,
    ),
    terms=_backward_terms,
    forward=_forward,
    gradients={"x": "dx", "weight": "dw"},
)
