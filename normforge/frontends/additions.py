"""Additions of a residual stream in FX graphs: before a norm, after its backward, and to the norm's
result, they become part of the package's operator. Where the order or the layout might change,
nothing is done."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from .gradient_sums import fold_gradients
from .routes import INPUTS, arguments_of, calls_of, getitems, replace_node
from .sums import fold_sums, nodes_between, terms_of


def fold_additions(graph: torch.fx.Graph, operators: Any) -> int:
    """Fold additions into the norms of a package. Returns how many.

    `r + norm(x)` becomes the operator that adds behind the norm, where `fold_sums` says so.
    `norm(a + b)` becomes the operator that adds, and its sum goes to all users of a + b.
    `dx + dresidual` becomes the backward with `dresidual`, where nobody else takes dx. Both terms
    and the sum have one shape and one dtype, and the sum is contiguous. Sums of gradients before a
    backward go where `fold_gradients` says so.
    """
    # Of two norms that an addition stands between, the first reads and writes less with it.
    folded = fold_sums(graph, operators)
    norm, backward = getattr(operators, "rms_norm", None), operators.backward_operator
    for node in calls_of(graph, operators.package, norm, backward):
        if node.target is norm:
            folded += _fold_before(node, operators.add_rms_norm)
        else:
            folded += _fold_after(node)
    return folded + fold_gradients(graph, operators)


def _fold_before(norm: Node, add_norm: Any) -> bool:
    x, weight, eps, offset, package = arguments_of(norm).values()
    terms = terms_of(x)
    if terms is None or x in (weight, eps) or len(getitems(norm)) < len(norm.users):
        return False
    between = nodes_between(x, norm)
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
    terms = terms_of(total)
    if terms is None or terms[0] is terms[1]:
        return False
    dresidual = terms[1] if terms[0] is dx else terms[0]
    between = nodes_between(backward, total)
    if between is None or dresidual in between:
        return False
    backward.args, backward.kwargs = tuple({**given, "dresidual": dresidual}.values()), {}
    backward.meta.pop(INPUTS, None)
    total.replace_all_uses_with(dx)
    backward.graph.erase_node(total)
    return True
