"""The rotary embedding of heads (Su et al., "RoFormer", 2021; rotate_half as in GPT-NeoX): y = x *
cos + rotate_half(x) * (sign * sin), as in Llama, and x in the columns behind the first R that are
rotated. Of a call, R is twice the columns of cos and sin, and pairs are as in rmsnorm_rope.py.

A rotation by the opposite angles takes it back. So its backward is the operation again, with a sign
of -1 and dy in the place of x.
"""

from __future__ import annotations

from typing import Any

from .rmsnorm_rope import terms_of_rotation
from .row_operation import RowOperation, Terms
from .signature import Signature
from .tensor import flag, group, number, rows, rows_out


def _terms(x: Any, cos: Any, sin: Any, sign: float, interleaved: bool = False) -> Terms:
    return {"y": terms_of_rotation(x, cos, sign * sin, interleaved, False)}


ROPE = RowOperation(
    name="rope",
    signature=Signature(
        rows("x", paired=True),
        group("cos"),
        group("sin"),
        rows_out("y"),
        number("sign"),
        flag("interleaved"),
        row_sums=0,
    ),
    terms=_terms,
)
