"""Checks the arguments of RMSNorm with the rotary embedding: each fault is one sentence."""

from __future__ import annotations

from typing import Any

import torch

from ..serve.checks import FLOATS


def check_rotated(
    x: Any,
    weight: Any,
    cos: Any,
    sin: Any,
    eps: Any,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    heads: int | None = None,
) -> None:
    """Raises TypeError or ValueError, in one sentence, for arguments that do not fit together."""
    for name, given in (("x", x), ("weight", weight), ("cos", cos), ("sin", sin)):
        if not isinstance(given, torch.Tensor) and not (given is None and name == "weight"):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(given).__name__}")
    if eps is None:
        raise TypeError("eps must be a number, got None")
    if type(interleaved) is not bool:
        raise TypeError(f"interleaved must be True or False, got {interleaved!r}")
    if heads is not None:
        _check_joined(x, heads, rotary_dim)
    elif x.dtype not in FLOATS or x.dim() < 2 or x.shape[-1] == 0 or x.shape[-1] % 2:
        raise ValueError(
            "x must be floating heads of an even number of columns, of shape (..., H, D), got "
            f"{x.dtype} of shape {tuple(x.shape)}"
        )
    width = x.shape[-1]
    if weight is not None and (weight.dim() != 1 or weight.shape[0] != width):
        raise ValueError(f"weight must have shape ({width},), got {tuple(weight.shape)}")
    tokens = x.shape[:-2] if heads is None else x.shape[:-1]
    if rotary_dim is None:
        rotary_dim = columns_of(width, None, heads)
    else:
        check_rotary_dim(width, rotary_dim)
    for name, given in (("cos", cos), ("sin", sin)):
        if given.dtype not in FLOATS:
            raise TypeError(f"{name} must be of a floating dtype, got {given.dtype}")
        if given.requires_grad:
            raise ValueError(f"{name} has no gradient here: give {name}.detach()")
        if not _fits(given.shape, shape := (*tokens, rotary_dim)):
            what = "x without its heads" if rotary_dim == width else "x's tokens and rotary_dim"
            what = what if heads is None else "x's tokens and a head"
            raise ValueError(
                f"{name} must have the shape {shape} of {what}, or half as many columns, or 1 "
                f"where it is repeated, got {tuple(given.shape)}"
            )
    for name, given in (("weight", weight), ("cos", cos), ("sin", sin)):
        if given is not None and given.device != x.device:
            raise ValueError(f"{name} is on {given.device} and x on {x.device}")


def check_rotary_dim(width: int, rotary_dim: Any) -> None:
    """Raises TypeError or ValueError where heads have not so many columns to be rotated."""
    if type(rotary_dim) is not int:
        raise TypeError(f"rotary_dim must be an int or None, got {type(rotary_dim).__name__}")
    if rotary_dim % 2 or not 0 < rotary_dim <= width:
        raise ValueError(
            f"rotary_dim must be an even number from 2 to the {width} columns of a head, got "
            f"{rotary_dim}"
        )


def check_heads(N: int, heads: Any, rotary_dim: Any) -> None:
    """Raises TypeError or ValueError where rows of N columns are not so many heads, of which all
    columns are rotated."""
    if type(heads) is not int:
        raise TypeError(f"heads must be an int or None, got {type(heads).__name__}")
    if rotary_dim is not None:
        raise ValueError("rotary_dim must be None where heads is given: all columns are rotated")
    if heads < 1 or N < 1 or N % (2 * heads):
        raise ValueError(f"rows of {N} columns are not {heads} heads of an even number of columns")


def _check_joined(x: torch.Tensor, heads: Any, rotary_dim: Any) -> None:
    check_heads(x.shape[-1] if x.dim() else 0, heads, rotary_dim)
    if x.dtype not in FLOATS:
        raise ValueError(
            f"x must be floating rows of {heads} heads, of shape (..., {heads} * D), got {x.dtype} "
            f"of shape {tuple(x.shape)}"
        )


def columns_of(width: int, rotary_dim: int | None, heads: int | None = None) -> int:
    """Return how many columns are rotated together, in rows of a width."""
    if heads is not None:
        return width // heads
    return width if rotary_dim is None else rotary_dim


def _fits(shape: Any, whole: Any) -> bool:
    """Return True if cos or sin of this shape are those of a whole shape, repeated and of half the
    columns or not."""
    *groups, columns = shape if len(shape) else (0,)
    *wanted, width = whole
    if len(groups) > len(wanted) or (columns != width and columns * 2 != width):
        return False
    along = zip(groups, wanted[len(wanted) - len(groups) :], strict=True)
    return all(one == 1 or one == other for one, other in along)  # `in` takes no symbolic sizes


def turns_of(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, columns: int) -> Any:
    """Return cos and sin of the first half of the columns that are rotated, of shape (..., 1, half
    as many), in one dtype: x's or fp32."""
    half = columns // 2
    kept = cos.dtype == sin.dtype and cos.dtype in (x.dtype, torch.float32)
    found = []
    for given in (cos, sin):
        first = given[..., :half].unsqueeze(-2)
        found.append(first if kept else first.float())
    return found[0], found[1]


def checked_heads(qkv: Any, heads: Any) -> tuple[int, int]:
    """Return the numbers of heads. Raises TypeError or ValueError for a projection that does not
    have them."""
    if not isinstance(qkv, torch.Tensor):
        raise TypeError(f"qkv must be a torch.Tensor, got {type(qkv).__name__}")
    whole = isinstance(heads, (tuple, list)) and len(heads) == 2
    if not whole or any(type(count) is not int or count < 1 for count in heads):
        raise ValueError(
            f"heads must be the numbers of heads of the queries and of the keys, got {heads!r}"
        )
    of_queries, of_keys = heads
    every = of_queries + 2 * of_keys
    columns = qkv.shape[-1] if qkv.dim() else 0
    if columns == 0 or columns % every:
        raise ValueError(
            f"qkv has {columns} columns, no multiple of {of_queries} + 2 * {of_keys} heads"
        )
    return of_queries, of_keys
