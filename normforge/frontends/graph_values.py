"""Reads what tracing left in the nodes of an FX graph about their values and places. No question
here fixes a symbol."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import permutations
from typing import Any

import torch
from torch.fx import GraphModule, Node

HALF = "partitioner_tag"
"""The key of AOTAutograd's mark of the nodes of a backward."""
_PLACE = ("custom", "recompute", "ac_graph_id", HALF)
"""Keys that other passes and users write into meta, to say on which stream, in which region and in
which half of a step a node runs, and whether it runs again in the backward."""
VALUES = ("val", "example_value", "tensor_meta")
"""Keys of what tracing knows about a node's result."""
_MOST_DIMENSIONS = 5
"""There are 24 orders of so many, of which the last stays."""


def graph_modules(module: GraphModule) -> Iterator[GraphModule]:
    """A module and those nested in it, such as the bodies of higher-order operators."""
    return (each for each in module.modules() if isinstance(each, GraphModule))


def change_graphs(module: GraphModule, change: Callable[[torch.fx.Graph], int]) -> int:
    """Change the graphs of a module and of those nested in it. change: of one graph, returns in how
    many places. Returns in how many it was in all."""
    changed = 0
    for each in graph_modules(module):
        count = change(each.graph)
        if count:
            each.graph.lint()
            each.recompile()
        changed += count
    return changed


def value_of(node: Any) -> Any:
    """The fake value of a node, in a graph of make_fx, AOTAutograd or Dynamo; None without one."""
    if not isinstance(node, Node):
        return None
    return node.meta.get("val", node.meta.get("example_value"))


def wants_gradient(node: Any) -> bool:
    """Return True for a tensor that a gradient is computed of."""
    return bool(getattr(value_of(node), "requires_grad", False))


def may_train(graph: torch.fx.Graph, given: Iterable[Any]) -> bool:
    """Return True if gradients of some of these tensors may be computed: they are now, or the graph
    says itself where they are."""
    if not any(map(wants_gradient, given)):
        return False
    switch = torch._C._set_grad_enabled
    return torch.is_grad_enabled() or any(node.target is switch for node in graph.nodes)


def in_one_place(nodes: Iterable[Node], but: str = "") -> bool:
    """Return True if nodes are marked alike: the same stream, region, pass and recomputation. but:
    a key that does not count."""
    keys = [key for key in _PLACE if key != but]
    first, *others = ([node.meta.get(key) or None for key in keys] for node in nodes)
    return all(other == first for other in others)


def same_size(one: Any, two: Any) -> bool:
    """Return True if two sizes are equal for every value of their symbols."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(one == two))


def are_alike(one: Any, two: Any) -> bool:
    """Return True if two values are tensors of one shape, dtype and device."""
    if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor):
        return False
    if (one.dtype, one.device) != (two.dtype, two.device):
        return False
    return has_shape(one, two.shape)


def has_shape(tensor: torch.Tensor, shape: Sequence[Any]) -> bool:
    """Return True if a tensor has a shape for every value of its symbols."""
    return tensor.dim() == len(shape) and all(map(same_size, tensor.shape, shape))


def is_contiguous(tensor: torch.Tensor) -> bool:
    """Return what the tensor's method of this name does, which would fix symbols."""
    return _is_dense(tuple(zip(tensor.shape, tensor.stride(), strict=True)))


def order_in_memory(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the order of a tensor's dimensions, the last of which stays, in which it is
    contiguous; None if there is none."""
    steps = tuple(zip(tensor.shape, tensor.stride(), strict=True))
    if not steps or len(steps) > _MOST_DIMENSIONS:
        return None
    *leading, last = range(len(steps))
    orders = ((*order, last) for order in permutations(leading))
    return next((order for order in orders if is_dense(tensor, order)), None)


def is_dense(tensor: torch.Tensor, order: Sequence[int]) -> bool:
    """Return True if a tensor is contiguous in an order of its dimensions."""
    steps = tuple(zip(tensor.shape, tensor.stride(), strict=True))
    return _is_dense([steps[i] for i in order])


def _is_dense(steps: Sequence[tuple[Any, Any]]) -> bool:
    """Return True if dimensions of these sizes and strides have no gaps, in this order."""
    step: Any = 1
    for size, stride in reversed(steps):
        if not same_size(size, 1) and not same_size(stride, step):
            return False
        step = step * size
    return True


def fake_value(target: Any, arguments: tuple[Any, ...]) -> Any:
    """Return the result of a call on the values that tracing left in its arguments; None without
    them."""
    values = [value_of(a) if isinstance(a, Node) else a for a in arguments]
    missing = any(
        isinstance(a, Node) and value is None for a, value in zip(arguments, values, strict=True)
    )
    modes = [mode for value in values if (mode := getattr(value, "fake_mode", None)) is not None]
    if missing or not modes or any(mode is not modes[0] for mode in modes):
        return None
    with torch.no_grad(), modes[0]:
        return target(*values)


def add_call(graph: torch.fx.Graph, like: Node, target: Any, *arguments: Any) -> Node:
    """Add a call where a graph inserts nodes, marked like another node, with its value where the
    arguments have theirs."""
    made = graph.call_function(target, arguments)
    made.meta = {key: known for key, known in like.meta.items() if key not in VALUES}
    traced = any("val" in a.meta for a in arguments if isinstance(a, Node))
    item = target is operator.getitem and isinstance(value_of(arguments[0]), tuple)
    value = value_of(arguments[0])[arguments[1]] if item else fake_value(target, arguments)
    if value is not None:
        made.meta["val" if traced else "example_value"] = value
    return made
