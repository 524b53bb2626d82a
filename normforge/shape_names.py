"""Names of shapes, with the options of a call: tables, shape files and the tuner write them alike.

The options that say how heads are rotated are a text, too. `rotary64` stands for the first 64
columns of a head, `interleaved` for neighbouring columns as pairs, and `rotary64+interleaved` for
both; "" for whole heads, whose halves are pairs.
"""

from __future__ import annotations


def shape_name(
    M: int,
    N: int,
    dtype: str,
    weight_dtype: str,
    offset: bool = False,
    residual: str = "",
    rotation: str = "",
) -> str:
    """Return `MxN:dtype[:weight dtype]` with `+offset`, `+residual[_dtype]`, `+rotary<columns>` and
    `+interleaved` behind it, as the tuner names shapes."""
    name = f"{M}x{N}:{dtype}" + ("" if weight_dtype == dtype else f":{weight_dtype}")
    name += "+offset" if offset else ""
    if residual:
        name += "+residual" + ("" if residual == dtype else f"_{residual}")
    return name + (f"+{rotation}" if rotation else "")


def rotation_name(columns: int, N: int, interleaved: bool = False) -> str:
    """Return how kernels rotate the first `columns` of heads of N columns."""
    parts = [f"rotary{columns}"] * (columns != N) + ["interleaved"] * interleaved
    return "+".join(parts)


def rotated_columns(rotation: str, N: int) -> int:
    """Return how many columns of heads of N are rotated."""
    first = rotation.partition("+")[0]
    return int(first.removeprefix("rotary")) if first.startswith("rotary") else N


def is_interleaved(rotation: str) -> bool:
    """Return True if neighbouring columns of heads are pairs, and not those of two halves."""
    return rotation.endswith("interleaved")
