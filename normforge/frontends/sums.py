"""Sums in FX graphs. Those of a residual stream and a norm's result, `r + norm(x)` as in OLMo 2 and
Gemma, become one operator of a package that has kernels for it."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from .graph_values import are_alike, in_one_place, is_contiguous, value_of
from .graph_writes import between, is_pure_operator
from .routes import arguments_of, calls_of, getitems, replace_node

_ASIDE = (operator.getitem, torch.ops.aten._assert_tensor_metadata.default)
_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def fold_sums(graph: torch.fx.Graph, operators: Any) -> int:
    """Fold `r + norm(x)` into the norms of a package that has kernels of `rms_norm` with `add` for
    such rows. Returns how many.

    Nobody else takes the norm's result. The terms and the sum have one shape and one dtype, and the
    sum is contiguous. The sum is then rounded once.
    """
    norm_and_add = getattr(operators, "norm_and_add", None)
    serves = getattr(norm_and_add, "serves", None)
    if serves is None:
        return 0
    found = calls_of(graph, operators.package, operators.rms_norm)
    return sum(_fold_sum(node, operators, serves) for node in found)


def _fold_sum(norm: Node, operators: Any, serves: Any) -> bool:
    x, weight, eps, offset, package = arguments_of(norm).values()
    results = getitems(norm)
    firsts = [item for item in results if item.args[1] == 0]
    if len(results) < len(norm.users) or len(firsts) != 1 or len(firsts[0].users) != 1:
        return False
    y, (total,) = firsts[0], firsts[0].users
    terms = terms_of(total)
    if terms is None or terms[0] is terms[1]:
        return False
    late = _nodes_of_results(norm, results, total)
    if nodes_between(norm, total) is None or late is None:
        return False
    rows, scale = value_of(x), value_of(weight)
    if rows is None or not serves(rows, scale, offset != 0):
        return False
    r = terms[1] if terms[0] is y else terms[0]
    meta = total.meta
    arguments = (x, r, weight, eps, offset, package)
    new = replace_node(norm, operators.rms_norm_and_add, arguments, total)
    total.replace_all_uses_with(y)
    graph = new.graph
    graph.erase_node(total)
    for node in reversed(late):  # they stand where the norm did
        new.append(node)
    y.meta = dict(meta)
    return True


def _nodes_of_results(norm: Node, results: list[Node], total: Node) -> list[Node] | None:
    """The nodes before a sum that take what the norm gives, in their order, as they can only stand
    behind the sum. None if one of them computes anything."""
    found, node = list[Node](), norm.next
    while node is not total:
        if node in results:
            found.append(node)
        elif set(node.all_input_nodes) & set(found):
            if node.target not in _ALIASES:
                return None
            found.append(node)
        node = node.next
    return found


def terms_of(node: Any) -> tuple[Node, Node] | None:
    """The terms of a sum without factor, broadcasting and promotion."""
    if not isinstance(node, Node) or node.target is not torch.ops.aten.add.Tensor:
        return None
    given = arguments_of(node)
    a, b = given["self"], given["other"]
    if given.get("alpha", 1) != 1 or not isinstance(a, Node) or not isinstance(b, Node):
        return None
    total = value_of(node)
    alike = all(are_alike(value_of(each), total) for each in (a, b))
    return (a, b) if alike and is_contiguous(total) else None


def nodes_between(first: Node, last: Node) -> set[Any] | None:
    """The nodes between two. None if one of them may change memory, or act in another way than by
    its results, or if the two run in different places."""
    if not in_one_place((first, last)) or not computes_alone(first, last):
        return None
    return set(between(first, last))


def computes_alone(first: Node, last: Node) -> bool:
    """Return True if all nodes between two act by their results, and change no memory."""
    for node in between(first, last):
        if node.op in ("placeholder", "get_attr") or node.target in _ASIDE:
            continue
        if isinstance(value_of(node), torch.SymInt | torch.SymFloat | torch.SymBool):
            continue
        if not is_pure_operator(node):
            return False
    return True
