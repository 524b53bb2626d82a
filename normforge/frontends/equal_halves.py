"""Says which tensors a graph has made of two equal halves, as models make cos and sin: of
`torch.cat((freqs, freqs), dim=-1)`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.fx import GraphModule, Node

from .graph_writes import written_by
from .spellings import kind, last_dims, parts_joined

_ALIKE = ("cast", "cosine", "sine", "unsqueezed", "product")
"""Kinds of operations that treat both halves of the columns alike: products with numbers."""


class EqualHalves:
    """Says of a node in a graph, or in a graph that it calls, whether both halves of its columns
    are the same. Nothing has written to what it is made of."""

    def __init__(self, module: GraphModule) -> None:
        self._given = dict(_operands(module))
        graphs = (each.graph for each in module.modules() if isinstance(each, GraphModule))
        written = (one for graph in graphs for node in graph.nodes for one in written_by(node))
        self._touched = self._sources_of(written)

    def _sources_of(self, nodes: Iterable[Node]) -> set[Node]:
        """Return nodes and all that they are made of, or views of."""
        found, waiting = set[Node](), [*nodes]
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                waiting += [*node.all_input_nodes, self._given.get(node, node)]
        return found

    def __call__(self, node: Any) -> bool:
        while isinstance(node, Node):
            node = self._given.get(node, node)
            parts = parts_joined(node)
            if node in self._touched or (parts is None and not _is_alike(node)):
                return False
            if parts is not None:
                return parts[0] is parts[1]
            node = node.args[0]
        return False


def _is_alike(node: Node) -> bool:
    kept = kind(node)
    if kept not in _ALIKE or not node.args:
        return False
    if kept == "unsqueezed":
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        return isinstance(dim, int) and dim not in last_dims(node)
    return kept != "product" or isinstance(node.args[1], int | float)


def _operands(module: GraphModule) -> Iterator[tuple[Node, Node]]:
    """Yield the inputs of graphs that are called once, as those of checkpointed layers, and what
    they are called with."""
    for outer in (each for each in module.modules() if isinstance(each, GraphModule)):
        for node in outer.graph.nodes:
            body = node.args[0] if node.op == "call_function" and node.args else None
            if not isinstance(body, Node) or body.op != "get_attr" or len(body.users) != 1:
                continue
            inner = getattr(outer, str(body.target), None)
            if isinstance(inner, GraphModule):
                inputs = [one for one in inner.graph.nodes if one.op == "placeholder"]
                if len(inputs) == len(node.args) - 1:
                    pairs = zip(inputs, node.args[1:], strict=True)
                    yield from (pair for pair in pairs if isinstance(pair[1], Node))
