"""Additions of a residual stream in FX graphs: before a norm, and after its backward, they become
part of the package's operator. Where the order or the layout might change, nothing is done."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from .graph_values import are_alike, in_one_place, is_contiguous, value_of
from .routes import INPUTS, arguments_of, getitems, replace_node


def fold_additions(graph: torch.fx.Graph, operators: Any) -> int:
    """Fold additions into the norms of a package. Returns how many.

    `norm(a + b)` becomes the operator that adds, and its sum goes to all users of a + b.
    `dx + dresidual` becomes the backward with `dresidual`, where nobody else takes dx. Both terms
    and the sum have one shape and one dtype, and the sum is contiguous.
    """
    folded = 0
    for node in list(graph.nodes):
        norm, backward = getattr(operators, "rms_norm", None), operators.backward_operator
        if node.op != "call_function" or node.target not in (norm, backward):
            continue
        if arguments_of(node)["package"] != operators.package:
            continue
        if node.target is norm:
            folded += _fold_before(node, operators.add_rms_norm)
        else:
            folded += _fold_after(node)
    return folded


def _fold_before(norm: Node, add_norm: Any) -> bool:
    x, weight, eps, offset, package = arguments_of(norm).values()
    terms = _terms(x)
    if terms is None or x in (weight, eps) or len(getitems(norm)) < len(norm.users):
        return False
    between = _between(x, norm)
    if between is None:
        return False
    if not between & set(x.users):
        place = norm
    elif not between & {weight, eps}:  # users of the sum may come before the norm
        place = x
    else:
        return False
    new = replace_node(norm, add_norm, (*terms, weight, eps, offset, package), place)
    with norm.graph.inserting_after(new):
        total = norm.graph.call_function(operator.getitem, (new, 2))
    total.meta = dict(x.meta)
    x.replace_all_uses_with(total)
    norm.graph.erase_node(x)
    return True


def _fold_after(backward: Node) -> bool:
    given = arguments_of(backward)
    items = getitems(backward)
    firsts = [item for item in items if item.args[1] == 0]
    if given["dresidual"] is not None or not given["need_dx"] or len(items) < len(backward.users):
        return False
    if len(firsts) != 1 or len(firsts[0].users) != 1:
        return False
    dx, (total,) = firsts[0], firsts[0].users
    terms = _terms(total)
    if terms is None or terms[0] is terms[1]:
        return False
    dresidual = terms[1] if terms[0] is dx else terms[0]
    between = _between(backward, total)
    if between is None or dresidual in between:
        return False
    backward.args, backward.kwargs = tuple({**given, "dresidual": dresidual}.values()), {}
    backward.meta.pop(INPUTS, None)
    total.replace_all_uses_with(dx)
    backward.graph.erase_node(total)
    return True


def _terms(node: Any) -> tuple[Node, Node] | None:
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


def _between(first: Node, last: Node) -> set[Any] | None:
    """The nodes between two. None if one of them may change memory, or act in another way than by
    its results, or if the two run in different places."""
    if not in_one_place((first, last)):
        return None
    between = []
    node = first.next
    while node is not last:
        between.append(node)
        node = node.next
    return set(between) if _are_pure(between) else None


def _are_pure(nodes: Iterable[Node]) -> bool:
    for node in nodes:
        if node.op in ("placeholder", "get_attr") or node.target is operator.getitem:
            continue
        if isinstance(value_of(node), torch.SymInt | torch.SymFloat | torch.SymBool):
            continue
        schema = getattr(node.target, "_schema", None)
        if schema is None or schema.is_mutable or not schema.returns or node.is_impure():
            return False
    return True
