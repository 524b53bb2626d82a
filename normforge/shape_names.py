"""Names of shapes, with the options of a call: tables, shape files and the tuner write them alike.

The options that say how heads are rotated are a text, too. `rotary64` stands for the first 64
columns of a head, `interleaved` for neighbouring columns as pairs, and `rotary64+interleaved` for
both; `joined128` for a row of several heads of 128 columns, each of which is rotated; "" for whole
heads, whose halves are pairs.
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
    """Return `MxN:dtype[:weight dtype]` with `+offset`, `+residual[_dtype]`, `+rotary<columns>`,
    `+joined<columns>` and `+interleaved` behind it, as the tuner names shapes."""
    name = f"{M}x{N}:{dtype}" + ("" if weight_dtype == dtype else f":{weight_dtype}")
    name += "+offset" if offset else ""
    if residual:
        name += "+residual" + ("" if residual == dtype else f"_{residual}")
    return name + (f"+{rotation}" if rotation else "")


def rotation_name(columns: int, N: int, interleaved: bool = False, joined: bool = False) -> str:
    """Return how kernels rotate the first `columns` of heads of N columns; joined: the N columns
    of a row are heads of so many."""
    kind = "joined" if joined else "rotary"
    parts = [f"{kind}{columns}"] * (columns != N) + ["interleaved"] * interleaved
    return "+".join(parts)


def rotated_columns(rotation: str, N: int) -> int:
    """Return how many columns of heads of N are rotated, or those of each head that is joined in
    a row of N."""
    digits = rotation.partition("+")[0].removeprefix("rotary").removeprefix("joined")
    return int(digits) if digits.isdecimal() else N


def is_interleaved(rotation: str) -> bool:
    """Return True if neighbouring columns of heads are pairs, and not those of two halves."""
    return rotation.endswith("interleaved")


def is_joined(rotation: str) -> bool:
    """Return True if a row is several heads, each of which is rotated."""
    return rotation.startswith("joined")
