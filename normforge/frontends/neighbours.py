"""Finds what Inductor would compute in the kernels of a norm, if that were its own, in Dynamo's
graphs: the operations before and behind it, element by element or over the same rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import torch
from torch.fx import Node

from .graph_values import is_contiguous, same_size, value_of

_SUMS = ("add", "iadd")
_ELEMENTWISE = (
    *("abs", "addcmul", "addcdiv", "bfloat16", "clamp", "clamp_max", "clamp_min", "clip", "clone"),
    *(
        "contiguous",
        "convert_element_type",
        "cos",
        "div",
        "double",
        "dropout",
        "elu",
        "erf",
        "exp",
        "float",
        "gelu",
        "half",
    ),
    *("hardswish", "hardtanh", "imul", "isub", "itruediv", "leaky_relu", "lerp", "log", "maximum"),
    *("minimum", "mish", "mul", "neg", "pow", "reciprocal", "relu", "relu6", "round", "rsqrt"),
    *("sigmoid", "sign", "silu", "sin", "softplus", "sqrt", "square", "sub", "tanh", "to"),
    *("truediv", "type", "type_as", "where"),
)
_VIEWS = (
    *("expand", "flatten", "permute", "reshape", "squeeze", "transpose", "unflatten", "unsqueeze"),
    *("view", "view_as"),
)
_OVER_ROWS = ("amax", "amin", "mean", "sum")
_KINDS = {
    **dict.fromkeys(_SUMS, "sum"),
    **dict.fromkeys(_ELEMENTWISE, "elementwise"),
    **dict.fromkeys(_VIEWS, "view"),
    **dict.fromkeys(_OVER_ROWS, "over rows"),
}


def kind_of(node: Any) -> str:
    """Return what a call is: a "sum" of two tensors, another operation "elementwise", a "view", a
    reduction "over rows"; "" for what Inductor does not fuse, such as slices, products of matrices
    and other operators."""
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return ""
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    kind = _KINDS.get(str(name).split(".")[0], "")
    value = value_of(node)
    if not kind or not isinstance(value, torch.Tensor):
        return ""
    if kind == "over rows":
        rows = value_of(node.args[0]) if node.args else None
        if not isinstance(rows, torch.Tensor) or not rows.dim():
            return ""
        return kind if same_size(prod(rows.shape[:-1]), prod(value.shape)) else ""
    return kind


def is_computed(node: Any) -> bool:
    """Return True if a tensor is computed element by element."""
    return kind_of(node) in ("sum", "elementwise")


def behind_views(node: Any) -> Any:
    """Return what a node is a view of, or of which it is one through others."""
    while (source := _source_of_view(node)) is not None:
        node = source
    return node


def _source_of_view(node: Any) -> Node | None:
    source = node.args[0] if kind_of(node) == "view" and node.args else None
    return source if isinstance(source, Node) else None


def is_copied(node: Any) -> bool:
    """Return True if a tensor is given another shape that needs a copy, which Inductor makes only
    for what is not its own."""
    while (source := _source_of_view(node)) is not None:
        name = getattr(node.target, "__name__", node.target)
        before, behind = value_of(source), value_of(node)
        reshaped = name in ("reshape", "flatten") and isinstance(before, torch.Tensor)
        if reshaped and is_contiguous(behind) and not is_contiguous(before):
            return True
        node = source
    return False


def users_of(node: Node) -> Iterator[Node]:
    """Yield the nodes that take a tensor or a view of it."""
    for user in node.users:
        if kind_of(user) == "view":
            yield from users_of(user)
        else:
            yield user


def fused_behind(y: Node) -> set[Node]:
    """Return the nodes that Inductor computes in the kernel that computes y, and y. A node that
    needs what another kernel makes of y is none of them."""
    fused, others, waiting = {y}, set[Node](), set(y.users)
    node = y.next
    while waiting:
        inputs = set(node.all_input_nodes)
        if inputs & fused and not inputs & others and _goes_along(node, inputs & fused):
            fused.add(node)
            waiting |= node.users.keys()
        elif inputs & (fused | others):
            others.add(node)
        waiting.discard(node)
        node = node.next
    return fused


def _goes_along(node: Node, inputs: Iterable[Node]) -> bool:
    if kind_of(node) in ("view", "over rows"):
        return True
    return is_computed(node) and any(are_as_many(node, one) for one in inputs)


def are_as_many(one: Any, other: Any) -> bool:
    """Return True if two nodes have tensors of one number of elements."""
    values = [value_of(node) for node in (one, other)]
    if not all(isinstance(value, torch.Tensor) for value in values):
        return False
    return same_size(*(prod(value.shape) for value in values))


def sources_of(node: Any, like: Node) -> set[Node]:
    """Return the tensors, of as many elements as another one, that a kernel reads in order to have
    a tensor that nobody else takes."""
    made = behind_views(node)
    if not are_as_many(made, like):
        return set()
    if not is_computed(made) or len(made.users) > 1:
        return {made}
    return set[Node]().union(*(sources_of(one, like) for one in made.all_input_nodes))
