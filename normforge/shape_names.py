"""Names of shapes, with the options of a call: tables, shape files and the tuner write them alike.

The option that says how heads are rotated is a text, too. `rotary64` stands for the first 64
columns of a head, and "" for whole heads, whose halves are pairs.
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
    """Return `MxN:dtype[:weight dtype][+offset][+residual[_dtype]][+rotary<columns>]`, the form in
    which the tuner names shapes."""
    name = f"{M}x{N}:{dtype}" + ("" if weight_dtype == dtype else f":{weight_dtype}")
    name += "+offset" if offset else ""
    if residual:
        name += "+residual" + ("" if residual == dtype else f"_{residual}")
    return name + (f"+{rotation}" if rotation else "")


def rotation_name(columns: int, N: int) -> str:
    """Return how kernels rotate the first `columns` of heads of N columns."""
    return "" if columns == N else f"rotary{columns}"


def rotated_columns(rotation: str, N: int) -> int:
    """Return how many columns of heads of N are rotated."""
    return int(rotation.removeprefix("rotary") or N)
