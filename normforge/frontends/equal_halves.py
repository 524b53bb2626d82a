"""Says which tensors a graph has made of two equal halves, as models make cos and sin: of
`torch.cat((freqs, freqs), dim=-1)`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.fx import GraphModule, Node

from .graph_values import graph_modules
from .graph_writes import is_pure, may_be_a_view
from .spellings import argument, kind, last_dims, parts_joined

_ALIKE = ("cast", "cosine", "sine", "unsqueezed", "product")
"""Kinds of operations that treat both halves of the columns alike: products with numbers."""


class EqualHalves:
    """Says of a node in a graph, or in a graph that it calls, whether both halves of its columns
    are the same. Nobody else may write to it, or to what it is made of behind these halves."""

    def __init__(self, module: GraphModule) -> None:
        self._outside, self._inside = dict[Node, Node](), dict[Node, list[Node]]()
        self._callers, self._kept = set[Node](), dict[Node, bool]()
        for caller, pairs in _calls(module):
            self._callers.add(caller)
            for inside, outside in pairs:
                self._outside[inside] = outside
                self._inside.setdefault(outside, []).append(inside)

    def __call__(self, node: Any) -> bool:
        while isinstance(node, Node):
            node = self._outside.get(node, node)
            parts = parts_joined(node)
            if not self._stays(node) or (parts is None and not _is_alike(node)):
                return False
            if parts is not None:
                return parts[0] is parts[1]
            node = node.args[0]
        return False

    def _stays(self, node: Node) -> bool:
        """Return True if nobody writes to a tensor or to a view of it, and no caller gets it."""
        if node not in self._kept:
            self._kept[node] = True  # until its users say otherwise
            users = (user for user in node.users if user not in self._callers)
            self._kept[node] = all(map(self._keeps, users)) and all(
                map(self._stays, self._inside.get(node, ()))
            )
        return self._kept[node]

    def _keeps(self, user: Node) -> bool:
        return is_pure(user) and (not may_be_a_view(user) or self._stays(user))


def _is_alike(node: Node) -> bool:
    kept = kind(node)
    if kept not in _ALIKE or not node.args:
        return False
    if kept == "unsqueezed":
        dim = argument(node, 1, "dim")
        return isinstance(dim, int) and dim not in last_dims(node)
    return kept != "product" or isinstance(node.args[1], int | float)


def _calls(module: GraphModule) -> Iterator[tuple[Node, list[tuple[Node, Node]]]]:
    """Yield the nodes that call a graph which nothing else calls, as those of checkpointed layers,
    with its inputs and what they are called with."""
    for outer in graph_modules(module):
        for node in outer.graph.nodes:
            body = node.args[0] if node.op == "call_function" and node.args else None
            if not isinstance(body, Node) or body.op != "get_attr" or len(body.users) != 1:
                continue
            inner = getattr(outer, str(body.target), None)
            given = [one for one in node.all_input_nodes if one is not body]
            if isinstance(inner, GraphModule) and not {*given} - {*node.args[1:]}:
                inputs = [one for one in inner.graph.nodes if one.op == "placeholder"]
                if len(inputs) == len(node.args) - 1:
                    pairs = zip(inputs, node.args[1:], strict=True)
                    yield node, [pair for pair in pairs if isinstance(pair[1], Node)]
