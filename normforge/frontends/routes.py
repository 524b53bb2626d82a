"""Turns one node of a norm in an FX graph into a call of a package's operator."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node

from ..serve.options import SMALLEST_EPS
from .graph_values import fake_value

MARK = "compile_with_inductor"
"""The key that torch.fx.passes.regional_inductor looks for in a node's meta."""

INPUTS = "eager_input_vals"
"""The key under which AOTAutograd keeps the arguments of a node, whose layouts Inductor then
keeps."""


def getitems(node: Node) -> list[Node]:
    """The users of a node that take one of its results."""
    return [
        user
        for user in node.users
        if user.op == "call_function" and user.target is operator.getitem
    ]


def arguments_of(node: Node) -> dict[str, Any]:
    """The arguments of a node by the names of its operator's schema, in that order."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return {name: given[name] for name in names if name in given}


def calls_of(graph: torch.fx.Graph, package: str, *targets: Any) -> list[Node]:
    """The calls of some operators that ask for a package, in the order of the graph."""
    calls = (n for n in graph.nodes if n.op == "call_function" and n.target in targets)
    return [call for call in calls if arguments_of(call)["package"] == package]


def takes(x: Any, weight: Any, normalized_shape: Any) -> bool:
    """Return True if the package's operators take these: one normalised dimension, dtypes they
    know."""
    if len(normalized_shape) != 1:
        return False
    if not isinstance(weight, Node) or not isinstance(x, Node):
        return True
    rows, scale = x.meta.get("val"), weight.meta.get("val")
    return rows is None or scale is None or scale.dtype in (rows.dtype, torch.float32)


def is_tiny(eps: Any) -> bool:
    """Return True if the backward of a norm with this eps is not for kernels: see SMALLEST_EPS."""
    return isinstance(eps, float | int) and not isinstance(eps, bool) and eps < SMALLEST_EPS


def of_tiny_eps(rstd: Any) -> bool:
    """Return True if a graph shows that an rstd is of such a norm. It does if it has the
    forward."""
    if not isinstance(rstd, Node) or rstd.target is not operator.getitem:
        return False
    forward: Any = rstd.args[0]
    known = isinstance(forward.target, torch._ops.OpOverload)
    return known and is_tiny(arguments_of(forward).get("eps"))


def _route_norm(node: Node, operators: Any) -> bool:
    given = arguments_of(node)
    x, weight = given["input"], given.get("weight")
    if not takes(x, weight, given["normalized_shape"]):
        return False
    arguments = (x, weight, given.get("eps"), 0.0, operators.package)
    replace_node(node, operators.rms_norm, arguments)
    return True


def _route_backward(node: Node, operators: Any) -> bool:
    given = arguments_of(node)
    x, weight = given["input"], given.get("weight")
    if not takes(x, weight, given["normalized_shape"]) or of_tiny_eps(given["rstd"]):
        return False
    need_dx, need_dw = given["output_mask"]
    arguments = (given["grad_out"], x, given["rstd"], weight, None, None, 0.0, need_dx, need_dw)
    replace_node(node, operators.rms_norm_backward, (*arguments, operators.package))
    return True


def replace_node(
    node: Node, target: Any, arguments: tuple[Any, ...], place: Node | None = None
) -> Node:
    """Put a call of `target` in the place of a node, or before the node `place`. Its first results
    are the node's."""
    graph = node.graph
    with graph.inserting_before(place or node):
        new = graph.call_function(target, arguments)
    new.meta = dict(node.meta)
    for each in (new, *getitems(node)):  # Inductor is not to take what is no norm of PyTorch's now
        if MARK in (each.meta.get("custom") or {}):
            each.meta["custom"] = {k: v for k, v in each.meta["custom"].items() if k != MARK}
    for stale in ("val", INPUTS):
        new.meta.pop(stale, None)
    value = fake_value(target, arguments)
    if value is not None:
        new.meta["val"] = value
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return new


Routes = Mapping[str, Callable[[Node, Any], bool]]
"""Functions by the names of PyTorch's operators. Each replaces a node by a call of one of the
operators of a package, or says that it is left alone."""

RMS_NORM_ROUTES: Routes = {
    "aten::_fused_rms_norm": _route_norm,
    "aten::_fused_rms_norm_backward": _route_backward,
}
