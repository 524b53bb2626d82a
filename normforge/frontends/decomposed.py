"""RMSNorm that a model writes out, as Hugging Face's classes do, becomes one operator of a package.

This works on graphs before autograd, such as Dynamo's: in a joint graph the backward takes what is
in between. One reader of all spellings is less than a pattern of torch.fx.subgraph_rewriter for
each: `x.float()` and `x.to(torch.float32)`, `w * y` and `y * w`, with and without a cast.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from .dtensor import are_whole_rows, is_dtensor
from .graph_values import (
    add_call,
    are_alike,
    in_one_place,
    may_train,
    order_in_memory,
    same_size,
    value_of,
)
from .graph_writes import is_written_behind
from .routes import MARK
from .spellings import cast_of, kind, only_user, other_factor

_aten = torch.ops.aten


class Norm(NamedTuple):
    """A norm as the arguments of the operator, the nodes that write it out, the last of which has
    its result, and the order of its dimensions in memory."""

    x: Node
    weight: Node | None
    eps: Any
    weight_offset: float
    nodes: list[Node]
    order: tuple[int, ...]


def replace_decomposed(
    graph: torch.fx.Graph, operators: Any, is_routed: Callable[..., bool] | None = None
) -> int:
    """Replace norms over the last dimension that a graph writes out by the operator. Returns how
    many. is_routed: as Worth, of those that are to be replaced; None for all.

    x is in bf16, fp16 or fp32, everything up to xhat in fp32, and the result in x's dtype. The
    weight may be missing, and may have a number added to it in fp32. A cast of xhat to x's dtype
    before the product is left out. Nothing else takes what is in between, and no other node stands
    there. In training, nothing writes to x or the weight behind it: the operator saves both, and
    narrow rows were saved as a copy in fp32. Rows that lie in another order than that of their
    dimensions, as transposed heads do, go to the operator as they lie.
    """
    replaced = 0
    for node in list(graph.nodes):
        found = read_norm(node)
        if found is None:
            continue
        x, weight, _, offset, nodes, _ = found
        if may_train(graph, (x, weight)) and is_written_behind(nodes[-1], (x, weight)):
            continue
        if is_routed is None or is_routed(x, weight, offset, nodes, nodes[-1]):
            _replace(graph, found, operators)
            replaced += 1
    if replaced:
        graph.lint()
    return replaced


def _replace(graph: torch.fx.Graph, norm: Norm, operators: Any) -> None:
    last = norm.nodes[-1]
    call = partial(add_call, graph, last)
    moved = norm.order != tuple(range(len(norm.order)))  # its result would be contiguous
    with graph.inserting_before(last):
        x = call(_aten.permute.default, norm.x, norm.order) if moved else norm.x
        item = call(operator.getitem, call(operators.rms_norm, x, *norm[1:4], operators.package), 0)
        if moved:
            back = tuple(norm.order.index(i) for i in range(len(norm.order)))
            item = call(_aten.permute.default, item, back)
    item.meta = dict(last.meta)
    last.replace_all_uses_with(item)
    for node in reversed(norm.nodes):
        graph.erase_node(node)


class Statistics(NamedTuple):
    """The part of a norm up to xhat: what is squared, eps, what is scaled, the node with xhat, and
    all nodes, in fp32."""

    wide: Node
    eps: Any
    scaled: Any
    xhat: Node
    nodes: set[Node]


def read_statistics(root: Any) -> Statistics | None:
    """Return what a node's root is of, if that is the mean of the squares of rows and a number, and
    one node alone takes it: a quotient by the root, or a product with its reciprocal."""
    divides = kind(root) == "root"
    shifted, of_root = (root.args[0], {root}) if divides else _reciprocal_root_of(root)
    eps, mean = _number_added(shifted)
    square = _mean_over_rows(mean)
    wide = _squared(square)
    xhat = only_user(root)
    if wide is None or xhat is None:
        return None
    scaled = _dividend(xhat, root) if divides else other_factor(xhat, root)
    nodes = {square, mean, shifted, *of_root, xhat}
    if any(getattr(value_of(n), "dtype", None) != torch.float32 for n in (wide, *nodes)):
        return None
    return Statistics(wide, eps, scaled, xhat, nodes)


def _reciprocal_root_of(node: Any) -> tuple[Any, set[Node]]:
    """Return what a node is the reciprocal root of, and the nodes that compute it."""
    what, args = kind(node), tuple(getattr(node, "args", ()))
    if what == "rsqrt" or (what == "power" and args[1:] == (-0.5,)):
        return args[0] if args else None, {node}
    if what == "product" and args[1:] == (1.0,):  # `1 / root` is traced as a reciprocal times 1
        inner, nodes = _reciprocal_root_of(args[0])
        return (inner, nodes | {node}) if nodes else (None, set())
    root = args[0] if what == "reciprocal" else None
    if what == "quotient" and args[0] == 1:
        root = args[1]
    if isinstance(root, Node) and kind(root) == "root":
        return root.args[0], {node, root}
    return None, set()


def _dividend(node: Node, root: Node) -> Any:
    """Return what a node divides by a root; None for another node."""
    return node.args[0] if kind(node) == "quotient" and node.args[1] is root else None


def read_norm(root: Any) -> Norm | None:
    """Return the norm that has this node, if all of it is as it must be."""
    found = read_statistics(root)
    if found is None:
        return None
    wide, eps, scaled, xhat, nodes = found
    x = wide
    if cast_of(wide) is not None and nodes.issuperset(wide.users):
        x, nodes = cast_of(wide), nodes | {wide}
    if scaled not in (x, wide):
        return None
    for result, weight, offset, later in read_results(x, xhat):
        run = _in_one_run(nodes | later, result)
        order = order_in_memory(value_of(result)) if run is not None else None
        if run is not None and order is not None and _may_be_replaced(x, weight, run):
            return Norm(x, weight, eps, offset, run, order)
    return None


def read_results(x: Node, xhat: Node) -> Iterator[tuple[Node, Node | None, float, set[Node]]]:
    """Yield the nodes that may be the result of a norm, last first, with the weight, its offset,
    and the nodes after xhat."""
    found: list[tuple[Node, Node | None, float, set[Node]]] = [(xhat, None, 0.0, set())]
    while (node := only_user(found[-1][0])) is not None:
        last, weight, offset, later = found[-1]
        factor = other_factor(node, last)
        scale = _scale(x, factor) if weight is None and factor is not None else None
        if scale is not None:
            weight, offset, later = scale[0], scale[1], later | scale[2]
        elif cast_of(node) is not last or value_of(node).dtype != value_of(x).dtype:
            break
        found.append((node, weight, offset, later | {node}))
    return reversed(found)


def _scale(x: Node, factor: Node) -> tuple[Node, float, set[Node]] | None:
    """The weight in a factor of xhat, what is added to it, and the nodes that do so in fp32."""
    offset, weight = _number_added(factor)
    nodes = {factor}
    if weight is None:
        offset, weight, nodes = 0.0, factor, set()
    if cast_of(weight) is not None:
        nodes |= {weight}
        weight = cast_of(weight)
    rows, value = value_of(x), value_of(weight)
    if type(value) is not type(rows) or value.dim() != 1 or value.device != rows.device:
        return None
    narrow = any(value_of(node).dtype != torch.float32 for node in nodes)
    if narrow or value.dtype not in (rows.dtype, torch.float32) or isinstance(offset, Node):
        return None
    return (weight, float(offset), nodes) if same_size(value.shape[0], rows.shape[-1]) else None


def _in_one_run(nodes: set[Node], result: Node) -> list[Node] | None:
    """Nodes in their order, the result last, if no other stands between them but for what reads a
    number or a weight."""
    run, node = [result], result
    while len(run) < len(nodes):
        node = node.prev
        if node in nodes:
            run.append(node)
        elif node.op not in ("placeholder", "get_attr") and node.target != "item":
            return None
    return run[::-1]


def _may_be_replaced(x: Node, weight: Node | None, run: list[Node]) -> bool:
    """Return True if the operator computes the result, and nobody sees the nodes before it."""
    rows, result = value_of(x), value_of(run[-1])
    if type(result) is not type(rows):
        return False
    if type(rows) is not FakeTensor and not (
        is_dtensor(rows) and are_whole_rows(rows, value_of(weight))
    ):
        return False
    if not are_alike(rows, result):
        return False
    if rows.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    if any(not set(run).issuperset(node.users) for node in run[:-1]):
        return False
    return MARK not in (run[0].meta.get("custom") or {}) and in_one_place(run)


# ---- One node ------------------------------------------------------------------------------------


def _number_added(node: Any) -> tuple[Any, Any]:
    """The number and the node that a sum has, None for both of another node. The number may be a
    node for one that Dynamo keeps open."""
    if kind(node) != "sum" or len(node.args) != 2:
        return None, None
    for number, term in (node.args, node.args[::-1]):
        known = isinstance(number, float | int) or isinstance(value_of(number), torch.SymFloat)
        if known and isinstance(value_of(term), torch.Tensor):
            return (number if isinstance(number, Node) else float(number)), term
    return None, None


def _mean_over_rows(node: Any) -> Any:
    """Return the node of which a node takes the mean over the last dimension, which it keeps."""
    if kind(node) != "mean":
        return None
    given = dict(zip(("x", "dim", "keepdim"), node.args, strict=False)) | node.kwargs
    x, dim = given.pop("x", None), given.pop("dim", None)
    rows = value_of(x)
    if given != {"keepdim": True} or not isinstance(rows, torch.Tensor):
        return None
    dims = tuple(dim) if isinstance(dim, list | tuple) else (dim,)
    return x if rows.dim() and dims in ((-1,), (rows.dim() - 1,)) else None


def _squared(node: Any) -> Any:
    if kind(node) == "power":
        return node.args[0] if node.args[1:] == (2,) else None
    if kind(node) == "product":
        return node.args[0] if len({*node.args}) == 1 and len(node.args) == 2 else None
    return node.args[0] if kind(node) == "square" and len(node.args) == 1 else None
