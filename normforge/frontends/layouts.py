"""Tells Inductor how the arguments of a package's operators are to lie in memory.

Inductor lays the arguments of an operator that a pass has put into a graph out as it likes, such as
the gradient of heads in the order of attention, and the package then copies what its kernels cannot
read. Where such a node says what it wants, the kernel that makes an argument writes it so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ..operations import GRADIENTS
from .graph_values import is_contiguous, same_size, value_of
from .routes import INPUTS

_STEPS = {"x": 2, **dict.fromkeys(GRADIENTS, 2), "residual": 1, "r": 2, "dresidual": 1}
"""The strides with which kernels step through the rows of an argument: two for those of heads."""


def ask_for_layouts(graph: torch.fx.Graph, operators: Any) -> None:
    """Keep the arguments of a package's operators where kernels can read them as they lie, and have
    the others made contiguous. Nodes whose values tracing did not leave stay as they are."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in operators.all:
            wanted = _wanted(node)
            if wanted is not None:
                node.meta[INPUTS] = (wanted, {})


def _wanted(node: Node) -> tuple[Any, ...] | None:
    """The values of a node's arguments, laid out as its kernel wants them."""
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema.arguments
    if node.kwargs:
        return None
    names = [argument.name for argument in schema[: len(node.args)]]
    values = [value_of(one) if isinstance(one, Node) else one for one in node.args]
    if any(isinstance(one, Node) and v is None for one, v in zip(node.args, values, strict=True)):
        return None
    rows = dict(zip(names, values, strict=True)).get("x")
    of_x = _steps(rows) if isinstance(rows, torch.Tensor) else None
    return tuple(
        value.new_empty(value.shape)
        if isinstance(value, torch.Tensor) and not _stays(name, value, of_x)
        else value
        for name, value in zip(names, values, strict=True)
    )


def _stays(name: str, value: torch.Tensor, of_x: list[Any] | None) -> bool:
    """Return True if kernels read an argument as it lies. of_x: the steps of x, with whose heads
    others go along."""
    steps = _steps(value) if name in _STEPS else None
    if steps is None or len(steps) > _STEPS[name]:
        return is_contiguous(value)
    if len(steps) < 2 or of_x is None or len(of_x) != 2:
        return True
    return same_size(steps[1], of_x[1])


def _steps(rows: torch.Tensor) -> list[Any] | None:
    """The numbers of rows that lie one stride apart, outermost first; None where a row has gaps."""
    *sizes, N = rows.shape
    *strides, last = rows.stride()
    if not same_size(last, 1) and not same_size(N, 1):
        return None
    groups: list[tuple[Any, Any]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if same_size(size, 1):
            continue
        if groups and same_size(groups[-1][1], stride * size):
            groups[-1] = (groups[-1][0] * size, stride)
        else:
            groups.append((size, stride))
    return [size for size, _ in groups]
