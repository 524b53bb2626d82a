"""RMSNorm of heads and the rotary embedding behind it, forward and backward, as in Qwen 3 and Gemma
3 (Su et al., "RoFormer", 2021; rotate_half as in GPT-NeoX): y = n * cos + rotate_half(n) *
sin with n = norm(x) * w, or n in the columns behind the first R that are rotated, as in
Qwen3-Next. Of a call, R is twice the columns of cos and sin. Columns i and i + R / 2 are a pair or,
interleaved, 2i and 2i + 1, as in GPT-J. Joined, a row is heads of R columns, and the norm is of all
of them, as in OLMo 2.

A kernel of the backward computes rstd again from the rows, so that a forward saves nothing but its
arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .gated_rmsnorm_backward import EPS, norm_terms
from .row_operation import RowOperation, Terms
from .signature import Signature
from .tensor import columns, flag, group, number, rows, rows_out, sums


def _pairs(n: Any, cos: Any, interleaved: bool) -> tuple[Any, Any, tuple[Any, ...]]:
    """Return the first columns of all pairs, the second ones, and what is behind the pairs, if
    anything is. cos: a number for every pair."""
    half, width = cos.shape[-1], n.shape[-1]
    rest = () if 2 * half == width else (n[..., 2 * half :],)
    if interleaved:
        return n[..., : 2 * half : 2], n[..., 1 : 2 * half : 2], rest
    return n[..., :half], n[..., half : 2 * half], rest


def _joined(first: Any, second: Any, rest: Iterable[Any], interleaved: bool) -> Any:
    import torch

    if not interleaved:
        return torch.cat((first, second, *rest), -1)
    # Batched gradients have no rule for flatten().
    *others, half = first.shape
    pairs = torch.stack((first, second), -1).reshape(*others, 2 * half)
    return torch.cat((pairs, *rest), -1)


def rotated(n: Any, cos: Any, sin: Any, interleaved: bool, joined: bool = False) -> Any:
    """Return n * cos + rotate_half(n) * sin of the columns that are rotated, and n behind them.
    cos, sin: a number for every pair of columns."""
    if joined:
        return rotated(*_apart(n, cos, sin), interleaved).reshape(n.shape)
    first, second, rest = _pairs(n, cos, interleaved)
    return _joined(first * cos - second * sin, second * cos + first * sin, rest, interleaved)


def _apart(n: Any, cos: Any, sin: Any) -> tuple[Any, Any, Any]:
    """Return n as heads, and cos and sin for all of them."""
    # Batched gradients have no rule for unflatten().
    *others, columns = n.shape
    width = 2 * cos.shape[-1]
    return n.reshape(*others, columns // width, width), cos.unsqueeze(-2), sin.unsqueeze(-2)


def terms_of_rotation(
    n: Any, cos: Any, sin: Any, interleaved: bool, joined: bool
) -> tuple[Any, Any]:
    """Return the terms of `rotated`: those with cos, or of columns that stay, and those with
    sin."""
    if joined:
        with_cos, with_sin = terms_of_rotation(*_apart(n, cos, sin), interleaved, False)
        return with_cos.reshape(n.shape), with_sin.reshape(n.shape)
    first, second, rest = _pairs(n, cos, interleaved)
    zeros = (one.new_zeros(one.shape) for one in rest)
    with_sin = _joined(-second * sin, first * sin, zeros, interleaved)
    return _joined(first * cos, second * cos, rest, interleaved), with_sin


def rmsnorm_rope(
    x: Any,
    weight: Any,
    cos: Any,
    sin: Any,
    eps: float,
    interleaved: bool = False,
    joined: bool = False,
) -> Any:
    """Return y in the dtype of the arguments, which is that of the arithmetic. Differentiable."""
    n = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
    return rotated(n, cos, sin, interleaved, joined)


def _forward_terms(
    x: Any,
    weight: Any,
    cos: Any,
    sin: Any,
    eps: float,
    interleaved: bool = False,
    joined: bool = False,
) -> Terms:
    """Return the terms of y."""
    n = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
    return {"y": terms_of_rotation(n, cos, sin, interleaved, joined)}


def _backward_terms(
    x: Any,
    dy: Any,
    weight: Any,
    cos: Any,
    sin: Any,
    eps: float,
    interleaved: bool = False,
    joined: bool = False,
) -> Terms:
    """Return the terms of the gradients: those of RMSNorm with dy rotated back in the place of
    dy."""
    parts = terms_of_rotation(dy, cos, -sin, interleaved, joined)
    found = [norm_terms(x, part, weight, eps) for part in parts]
    normalized = found[0][0]
    dx = tuple(term for _, terms in found for term in terms)
    return {"dx": dx, "dw": ((parts[0] + parts[1]) * normalized,)}


def _backward_magnitudes(
    x: Any,
    dy: Any,
    weight: Any,
    cos: Any,
    sin: Any,
    eps: float,
    interleaved: bool = False,
    joined: bool = False,
) -> tuple[Any, ...]:
    """Return the magnitudes of what dw adds up: dy rotated back is a sum of two products."""
    with_cos, with_sin = terms_of_rotation(dy, cos, -sin, interleaved, joined)
    normalized, _ = norm_terms(x, dy, weight, eps)
    return ((with_cos.abs() + with_sin.abs()) * normalized.abs(),)


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
        flag("interleaved"),
        flag("joined"),
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
        flag("interleaved"),
        flag("joined"),
        row_sums=2,
        summed=True,
    ),
    terms=_backward_terms,
    magnitudes=_backward_magnitudes,
    forward=_forward,
    gradients={"x": "dx", "weight": "dw"},
)
