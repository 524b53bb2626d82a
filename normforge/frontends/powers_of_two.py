"""Reads how a graph rounds the scale of a block up to a power of two, as DeepSeek-V3.1 does: by
logarithms, `exp2(ceil(log2(s)))`, or by bits, where the exponent is one larger if there is more
than the exponent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from .graph_values import has_shape, value_of
from .spellings import kind, limits_of


class Step(NamedTuple):
    """A number of a block on the way from its scale to the least power of two that is no
    smaller."""

    what: str


SCALE, POWER_OF_TWO = Step("scale"), Step("power of two")
_HIGH, _CARRY = Step("high bits"), Step("carry")
_STEPS: dict[tuple[Step, str, Any], Step] = {
    (SCALE, "logarithm", None): Step("logarithm"),
    (Step("logarithm"), "ceiling", None): Step("exponent"),
    (Step("exponent"), "power of two", None): POWER_OF_TWO,
    (Step("exponent"), "power of a number", 2): POWER_OF_TWO,
    (SCALE, "bits", torch.int32): Step("bits"),
    (Step("bits"), "shifted right", 23): _HIGH,
    (_HIGH, "masked", 0xFF): _HIGH,  # a scale has no sign
    (Step("bits"), "masked", 0x7FFFFF): Step("mantissa"),
    (Step("mantissa"), "cast", torch.bool): Step("has mantissa"),
    (Step("has mantissa"), "cast", torch.int32): _CARRY,
    **{
        (Step("raised"), "clamped", to): Step("raised") for to in ((1, 254), (1, None), (None, 254))
    },
    (Step("raised"), "shifted left", 23): Step("raised bits"),
    (Step("bits"), "sum", 0x7FFFFF): Step("carried"),
    (Step("carried"), "masked", 0x7F800000): Step("raised bits"),
    (Step("raised bits"), "bits", torch.float32): POWER_OF_TWO,
}
"""The steps by what is taken, by kind, and by the number or dtype of the node."""


def step_of(node: Node, source: Callable[[Any], Step | None]) -> Step | None:
    """Return what a node computes, or None if it is no such step. source: says this of what it
    takes."""
    what, (taken, *others) = kind(node), node.args or (None,)
    if what == "sum" and len(others) == 1 and isinstance(others[0], Node):
        if {source(taken), source(others[0])} != {_HIGH, _CARRY}:
            return None
        same = has_shape(value_of(taken), value_of(others[0]).shape)  # those of the same block
        return Step("raised") if same else None
    if what in ("power", "power of a number") and len(others) == 1:
        what, taken, others = "power of a number", others[0], [taken]
    before = source(taken)
    if before is None or what is None:
        return None
    what = "bits" if what == "viewed" else what
    number: Any = next((one for one in others if isinstance(one, int | float)), None)
    if what in ("bits", "cast"):
        number = value_of(node).dtype
    elif what == "clamped":
        number = limits_of(node)
    return _STEPS.get((before, what, number))
