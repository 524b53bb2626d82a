"""Says of which nodes of graphs before autograd it is known that they write to nothing. A pure one
that is not known costs speed, and one that wrote unseen would cost right results."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional

from .graph_values import value_of
from .spellings import kind

_RESULTS = (
    *(operator.matmul, torch.matmul, "matmul", torch.bmm, torch.nn.functional.linear),
    *("size", "item", operator.sub, operator.floordiv, operator.truediv, operator.mod),
    torch._C._log_api_usage_once,
)
"""Functions and methods that compute something new, beside those that have a kind, and one that
PyTorch's modules call when they are made."""
_PARTS = (operator.getitem, torch.split, "split", "contiguous", "expand")
"""Functions and methods whose result may be the memory of what they take."""
_VIEWS = (
    "cast",
    "halves",
    "unsqueezed",
    "squeezed",
    "transposed",
    "permuted",
    "viewed",
    "complex",
    "real",
    "conjugate",
    "copied",
)
"""Kinds of operations of which the same is true."""


_WITH_PLACES: dict[Any, int] = {
    functional.silu: 1,
    functional.relu: 1,
    functional.leaky_relu: 2,
    functional.dropout: 3,
    functional.gelu: 2,
    functional.softplus: 3,
    functional.scaled_dot_product_attention: 7,
}
"""Functions that compute something new, if they are not told to write it over what they take, which
stands behind so many arguments."""


def is_pure(node: Node) -> bool:
    """Return True for a node that only computes a result: it changes neither memory nor how others
    are computed."""
    if node.op in ("placeholder", "get_attr"):
        return True
    if node.op not in ("call_function", "call_method") or "out" in node.kwargs:
        return False
    if hasattr(node.target, "_schema"):
        return is_pure_operator(node)
    places = _WITH_PLACES.get(node.target) if node.op == "call_function" else None
    if places is not None:
        return len(node.args) <= places and not node.kwargs.get("inplace")
    return kind(node) is not None or node.target in (*_RESULTS, *_PARTS)


def may_be_a_view(node: Node) -> bool:
    """Return True for a pure node whose result may be the memory of what it takes."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return any(one.alias_info is not None for one in schema.returns)
    return kind(node) in _VIEWS or node.target in _PARTS


def is_pure_operator(node: Node) -> bool:
    """Return True for a call of an operator with a schema that only computes results."""
    schema = getattr(node.target, "_schema", None)
    return not (schema is None or schema.is_mutable or not schema.returns or node.is_impure())


def between(first: Node, last: Node) -> Iterator[Node]:
    """Yield the nodes of a graph from behind one to before another."""
    node = first.next
    while node is not last:
        yield node
        node = node.next


def are_pure_between(first: Node, last: Node) -> bool:
    """Return True if nothing writes to memory from behind one node of a graph to before another."""
    return all(map(is_pure, between(first, last)))


def is_written_behind(last: Node, given: Iterable[Any]) -> bool:
    """Return True if a node behind `last` may write to the memory of tensors that are given. A
    backward that reads it again would find something else."""
    memory = {_memory_of(value_of(one)) for one in given} - {None}
    writers = (n for n in _following(last) if n.op != "output" and not is_pure(n))
    taken = (_memory_of(value_of(one)) for node in writers for one in node.all_input_nodes)
    return any(one in memory for one in taken)


def _memory_of(value: Any) -> int | None:
    """Return what the values of views have in common; None for what has no memory."""
    try:
        return int(value.untyped_storage()._cdata)
    except (AttributeError, RuntimeError, NotImplementedError):  # no tensor, or a subclass
        return None


def _following(node: Node) -> Iterator[Node]:
    while (node := node.next).op != "root":
        yield node
