"""Says which memory the nodes of graphs before autograd may change."""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch._ops import HigherOrderOperator
from torch.fx import Node

_PURE = ("torch", "builtins", "math", "")
"""The packages whose functions say by their names or arguments that they write to something, as by
`add_`, `out` and `inplace`."""


def written_by(node: Node) -> list[Node]:
    """Return the tensors that a node may write to: all that it takes, of a function that is not
    PyTorch's. What a graph writes that it calls, nodes of that graph say."""
    everything = node.all_input_nodes
    if node.op in ("placeholder", "get_attr", "output") or not everything:
        return []
    first, target = everything[:1], node.target
    if isinstance(target, HigherOrderOperator):
        return [] if first[0].op == "get_attr" else everything
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return everything if schema.is_mutable else []
    if node.op == "call_method":
        return first if str(target).endswith("_") else []
    if node.op != "call_function" or "out" in node.kwargs:
        return everything
    name, module = (str(getattr(target, of, None) or "") for of in ("__name__", "__module__"))
    if module in ("_operator", "operator"):
        in_place = name.startswith("i") and hasattr(operator, name[1:])
        return first if in_place or target in (operator.setitem, operator.delitem) else []
    if node.kwargs.get("inplace") or (name.endswith("_") and not name.startswith("_")):
        return first
    return [] if module.partition(".")[0] in _PURE else everything


def changes_how(node: Node) -> bool:
    """Return True if a node may change how those behind it are computed, such as the modes of
    autograd and autocast, or calls a graph."""
    if isinstance(node.target, HigherOrderOperator):
        return True
    if node.op != "call_function" or getattr(node.target, "_schema", None) is not None:
        return False
    return str(getattr(node.target, "__name__", "")).startswith("_")


def nodes_between(first: Node, last: Node) -> Iterator[Node]:
    """Yield the nodes of a graph from behind one to before another."""
    node = first.next
    while node is not last:
        yield node
        node = node.next
