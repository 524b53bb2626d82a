"""Sums of gradients in FX graphs: where a norm's result went to several layers, such as the
projections of queries, keys and values, the gradients that come back are added before the norm's
backward. Those sums become part of it, where a package has kernels that add."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from .graph_values import are_alike, is_contiguous, value_of
from .neighbours import behind_views, is_computed
from .routes import arguments_of, calls_of, replace_node
from .sums import nodes_between, terms_of

_MOST = 3
"""Gradients that kernels add."""


def fold_gradients(graph: torch.fx.Graph, operators: Any) -> int:
    """Fold sums of gradients into the backwards of a package. Returns how many additions.

    A sum goes to the backward alone. Its two or three terms are like x, contiguous, and written by
    others than Inductor, such as products of matrices, for of what it computes itself it writes the
    sum at once. Without the sum two tensors less move through memory. It is computed in fp32.
    """
    serves = getattr(getattr(operators, "sum_backward", None), "serves", None)
    if serves is None:
        return 0
    found = calls_of(graph, operators.package, operators.rms_norm_backward)
    return sum(_fold(node, operators, serves) for node in found)


def _fold(backward: Node, operators: Any, serves: Any) -> int:
    given = arguments_of(backward)
    plain = given["need_dx"] and given["need_dw"] and given["dw_dtype"] is None
    if not plain or given["weight"] is None:
        return 0
    added = _additions(given["dy"], backward)
    terms = [term for node in added for term in terms_of(node) or () if term not in added]
    if not 1 < len(terms) <= _MOST or not all(map(_is_written, terms)):
        return 0
    others = [given[name] for name in ("x", "rstd", "weight", "dresidual")]
    if set(others) & set(added) or not _may_move(added, backward):
        return 0
    x, _, weight, dresidual = map(value_of, others)
    known = (x, weight) if others[3] is None else (x, weight, dresidual)
    if any(value is None for value in known) or not are_alike(value_of(terms[0]), x):
        return 0
    if not serves(len(terms), x, weight, dresidual, given["weight_offset"] != 0):
        return 0
    gradients = (*terms, *[None] * (_MOST - len(terms)))
    of_call = (*gradients, *others, given["weight_offset"], given["package"])
    replace_node(backward, operators.backward_of_sum, of_call)
    for node in reversed(added):
        backward.graph.erase_node(node)
    return len(added)


def _additions(total: Any, user: Node) -> list[Node]:
    """Return the additions that a sum is made of, the innermost first, where each goes to the next
    one alone and the last to `user`."""
    terms = terms_of(total)
    if terms is None or list(total.users) != [user]:
        return []
    inner = [one for term in terms for one in _additions(term, total)]
    return [*inner, total]


def _is_written(term: Node) -> bool:
    value = value_of(term)
    return (
        isinstance(value, torch.Tensor)
        and is_contiguous(value)
        and not is_computed(behind_views(term))
    )


def _may_move(added: list[Node], backward: Node) -> bool:
    """Return True if the terms are the same behind the additions, and all is in one place."""
    return all(nodes_between(node, backward) is not None for node in added)
