"""Finds gated norms that a model writes out, as in Hugging Face's Qwen3-Next and Mamba 2: norm and
gate become one operator of the packages of `rms_norm_gated`.

This works on graphs before autograd. Inductor makes one kernel of norm and gate as well, so only
those are taken that nothing else would go into that kernel with, as `Worth` counts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from .decomposed import read_norm, read_results, read_statistics
from .gated_node import rms_norm_gated_forward
from .graph_values import (
    add_call,
    are_alike,
    change_graphs,
    in_one_place,
    is_contiguous,
    may_train,
    value_of,
)
from .graph_writes import between, is_pure, is_written_behind
from .routes import MARK
from .spellings import argument, cast_of, kind, only_user, other_factor, widened
from .worth import Worth

_log = logging.getLogger(__name__)


class Gated(NamedTuple):
    """A gated norm: its arguments, the activation and whether the norm comes before the gate, the
    node with its result, and all nodes that write it out."""

    x: Node
    z: Node
    weight: Node | None
    eps: Any
    kind: tuple[str, bool]
    result: Node
    nodes: set[Node]


class _Gate(NamedTuple):
    activation: str
    z: Node
    nodes: set[Node]


def fuse_gates(module: GraphModule, operators: Any) -> int:
    """Replace gated norms, also in the graphs that one calls, where the packages of
    `rms_norm_gated` have kernels. Returns how many. Nothing else takes what is in between."""
    if not operators.gated:
        return 0
    functions = import_module(operators.gated).functions

    def change(graph: torch.fx.Graph) -> int:
        order = {node: i for i, node in enumerate(graph.nodes)}
        return sum(_fuse(graph, node, order, functions) for node in order)

    fused = change_graphs(module, change)
    if fused:
        _log.info("joined %d norms and the gates beside them", fused)
    return fused


def _fuse(graph: torch.fx.Graph, node: Node, order: dict[Node, int], functions: Any) -> bool:
    readings = (_norm_first(node), *_gate_first(node))
    found = next((one for one in readings if one and _is_whole(one, order)), None)
    if found is None or not _is_served(found, functions):
        return False
    _replace(graph, found, order, functions.name)
    return True


def _norm_first(root: Node) -> Gated | None:
    """Return norm(x) * w * act(z), if a node is the root of that, or its reciprocal."""
    norm = read_norm(root)
    if norm is None or norm.weight_offset:
        return None
    normed = norm.nodes[-1]
    product = only_user(normed)
    gate = None if product is None else _gate(other_factor(product, normed))
    if product is None or gate is None:
        return None
    nodes = {*norm.nodes, *gate.nodes, product}
    result = _in_dtype_of(norm.x, product)
    made = (norm.x, gate.z, norm.weight, norm.eps, (gate.activation, True))
    return None if result is None else Gated(*made, result, nodes | {result})


def _gate_first(root: Node) -> Iterator[Gated]:
    """Yield what may be norm(x * act(z)) * w, longest first, if a node is the root of that, or its
    reciprocal."""
    found = read_statistics(root)
    if found is None:
        return
    product = found.wide
    if found.scaled is not product:
        return
    for one in product.args if kind(product) == "product" else ():
        gate = _gate(one)
        rows = other_factor(product, one) if gate is not None else None
        if gate is None or rows is None:
            continue
        x = widened(rows)
        nodes = {*found.nodes, *gate.nodes, product, *({rows} - {x})}
        for result, weight, offset, later in read_results(x, found.xhat):
            if not offset:
                made = (x, gate.z, weight, found.eps, (gate.activation, False))
                yield Gated(*made, result, nodes | later)


def _gate(node: Any) -> _Gate | None:
    """Return the gate that a node is the activation of, in fp32 or in its own dtype."""
    activation = _activation(node)
    z = node.args[0] if activation else None
    if activation is None or not isinstance(z, Node):
        return None
    made = widened(z)
    return _Gate(activation, made, {node} if made is z else {node, z})


def _activation(node: Any) -> str | None:
    """Return the name of the activation that a node is, if it is one of a tensor alone."""
    if not isinstance(node, Node) or len(node.args) != 1:
        return None
    if node.target is torch.nn.functional.silu:
        return "silu" if not argument(node, 1, "inplace", False) else None
    return "sigmoid" if kind(node) == "sigmoid" else None


def _in_dtype_of(x: Node, product: Node) -> Node | None:
    """Return the node with a product in the dtype of x, behind its cast where there is one."""
    dtype, user = value_of(x).dtype, only_user(product)
    if user is not None and cast_of(user) is product and value_of(user).dtype == dtype:
        return user
    return product if value_of(product).dtype == dtype else None


def _is_whole(found: Gated, order: dict[Node, int]) -> bool:
    """Return True if the operator computes the result, and nobody sees the nodes before it."""
    rows, result = value_of(found.x), value_of(found.result)
    if not found.nodes.isdisjoint(found[:3]):  # a step is an argument, too
        return False
    if type(rows) is not FakeTensor or type(value_of(found.z)) is not FakeTensor:
        return False
    if not are_alike(rows, value_of(found.z)) or not are_alike(rows, result):
        return False
    if type(rows.shape[-1]) is not int or not isinstance(found.eps, float):
        return False
    if not is_contiguous(result):
        return False
    if any(not found.nodes.issuperset(node.users) for node in found.nodes - {found.result}):
        return False
    first = min(found.nodes, key=order.__getitem__)
    marked = any(MARK in (node.meta.get("custom") or {}) for node in found.nodes)
    if marked or not in_one_place(found.nodes):
        return False
    others = (node for node in between(first, found.result) if node not in found.nodes)
    return all(map(is_pure, others))


def _is_served(found: Gated, functions: Any) -> bool:
    """Return True if there are kernels, which are worth it."""
    rows, scale, saved = value_of(found.x), value_of(found.weight), found[:3]
    trains = may_train(found.result.graph, saved)
    if trains and is_written_behind(found.result, saved):
        return False
    if not functions.serves(rows, scale, found.kind, trains):
        return False
    return Worth(None).of_gated(*saved, found.nodes, found.result)


def _replace(graph: torch.fx.Graph, found: Gated, order: dict[Node, int], package: str) -> None:
    """Put the operator in front of the result, and let all users of that take its own."""
    last = found.result
    with graph.inserting_before(last):
        y = add_call(graph, last, rms_norm_gated_forward, *found[:4], *found.kind, package)
    y.meta = dict(last.meta)
    last.replace_all_uses_with(y)
    for node in sorted(found.nodes, key=order.__getitem__, reverse=True):
        graph.erase_node(node)
