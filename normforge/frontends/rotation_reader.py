"""Reads rotations of heads behind their norm from graphs before autograd, as Hugging Face's models
write them: x * cos + rotate_half(x) * sin, of all columns or of the first ones."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from .graph_values import same_size, value_of
from .routes import arguments_of
from .spellings import argument, cast_of, kind, last_dims, only_user, other_factor, parts_joined


class Rotation(NamedTuple):
    """A rotation of heads: x, of which the first columns are rotated, cos and sin, the number of
    these columns, the node with the result, and all nodes between."""

    x: Node
    cos: Node
    sin: Node
    columns: int
    result: Node
    nodes: set[Node]


class Heads(NamedTuple):
    """Heads as views of what a norm gives. transposed: they stand in front of the tokens; joined:
    the norm is of all heads of a token."""

    norm: Node
    transposed: bool
    joined: bool
    nodes: set[Node]


def read_rotation(total: Node, operators: Any) -> tuple[Rotation, Heads] | None:
    """Return the rotation whose two products a node adds, and the norm before it."""
    if kind(total) != "sum" or len(total.args) != 2:
        return None
    for one, two in (total.args, total.args[::-1]):
        if kind(one) == kind(two) == "product" and isinstance(one, Node):
            for turned in one.args:
                rotation = _rotation(total, one, turned, two)
                heads = None if rotation is None else _heads(rotation.x, operators)
                if rotation is not None and heads is not None:
                    return rotation, heads
    return None


def _rotation(total: Node, with_cos: Node, x: Any, with_sin: Any) -> Rotation | None:
    """Return x * cos + rotate_half(x) * sin, if that is what a sum is of."""
    cos = other_factor(with_cos, x) if isinstance(x, Node) else None
    value = value_of(x)
    columns = value.shape[-1] if isinstance(value, torch.Tensor) and value.dim() == 4 else None
    if cos is None or type(columns) is not int:
        return None
    for half in with_sin.args:
        parts = _rotated_half(half, x, columns)
        sin = other_factor(with_sin, half) if parts is not None else None
        if parts is not None and sin is not None:
            nodes = {x, with_cos, with_sin, half, *parts, total}
            return _with_the_rest(Rotation(x, cos, sin, columns, total, nodes))
    return None


def _rotated_half(node: Any, x: Node, columns: int) -> set[Node] | None:
    """Return the nodes of which `rotate_half(x)` is made, if a node is that."""
    parts = parts_joined(node)
    if parts is None or kind(parts[0]) != "negation":
        return None
    second: Any = parts[0].args[0]
    first = parts[1]
    whole = [_part_of(one, x) for one in (first, second)]
    if whole != [(0, columns // 2), (columns // 2, columns)]:
        return None
    return {parts[0], first, second, *_chunks(first, second)}


def _part_of(node: Any, x: Node) -> tuple[int, int] | None:
    """Return the first column of x that a node has, and the one behind its last."""
    if not isinstance(node, Node) or node.target is not operator.getitem:
        return None
    source: Any = node.args[0]
    at: Any = node.args[1]
    width = value_of(x).shape[-1]
    if isinstance(source, Node) and kind(source) == "halves" and source.args[0] is x:
        count, dim = argument(source, 1, "chunks"), argument(source, 2, "dim", 0)
        if count == 2 and dim in last_dims(x) and at in (0, 1) and width % 2 == 0:
            return at * width // 2, (at + 1) * width // 2
    if source is not x or not isinstance(at, tuple) or len(at) != 2 or at[0] is not Ellipsis:
        return None
    part = at[1]
    if not isinstance(part, slice) or part.step not in (None, 1):
        return None
    ends = (part.start, part.stop)
    if any(end is not None and (type(end) is not int or end < 0) for end in ends):
        return None
    return part.indices(width)[0], part.indices(width)[1]


def _chunks(*parts: Any) -> set[Node]:
    return {part.args[0] for part in parts if kind(part.args[0]) == "halves"}


def _with_the_rest(turned: Rotation) -> Rotation | None:
    """Return a rotation of the first columns with the others behind it, if it is one, and with the
    cast of its result to x's dtype, if there is one."""
    result = turned.result
    rows, value = value_of(turned.x), value_of(result)
    nodes = set(turned.nodes)
    user = only_user(result)
    if value.dtype != rows.dtype:
        if user is None or cast_of(user) is not result or value_of(user).dtype != rows.dtype:
            return None
        nodes.add(user)
        result, user = user, only_user(user)
    whole = turned.x.args[0] if turned.x.target is operator.getitem else None
    if not isinstance(whole, Node) or not isinstance(value_of(whole), torch.Tensor):
        return turned._replace(result=result, nodes=nodes)
    parts = None if user is None else parts_joined(user)
    if parts is None or parts[0] is not result:
        return None
    width = value_of(whole).shape[-1]
    if [_part_of(one, whole) for one in (turned.x, parts[1])] != [
        (0, turned.columns),
        (turned.columns, width),
    ]:
        return None
    assert user is not None
    nodes |= {whole, parts[1], user}
    return turned._replace(x=whole, result=user, nodes=nodes)


def _heads(x: Node, operators: Any) -> Heads | None:
    """Return the norm that heads are views of."""
    nodes, transposed, joined, node = {x}, False, False, x
    while isinstance(node, Node):
        nodes.add(node)
        given = node.args[0] if node.args else None
        if _is_result(node, operators):
            assert isinstance(given, Node)
            rows = value_of(node)
            whole = isinstance(rows, torch.Tensor) and rows.dim() == (3 if joined else 4)
            return Heads(given, transposed, joined, nodes) if whole else None
        if joined or not isinstance(given, Node):
            return None
        if _swaps_tokens_and_heads(node) and not transposed:
            transposed = True
        elif kind(node) == "viewed" and _makes_heads(value_of(given), value_of(node)):
            joined = True
        else:
            return None
        node = given
    return None


def _is_result(node: Node, operators: Any) -> bool:
    """Return True for the result of a norm of this package that nothing else is taken of."""
    norm = node.args[0] if node.args else None
    if not isinstance(norm, Node) or norm.target is not operators.rms_norm:
        return False
    package = arguments_of(norm)["package"]
    first = node.target is operator.getitem and node.args[1] == 0
    return bool(first and package == operators.package)


def _swaps_tokens_and_heads(node: Node) -> bool:
    dims = tuple(node.args[1:])
    if kind(node) == "transposed" and not node.kwargs:
        return {*dims} in ({1, 2}, {-3, -2}, {1, -2}, {-3, 2})
    flat = dims[0] if len(dims) == 1 and isinstance(dims[0], list | tuple) else dims
    return kind(node) == "permuted" and [*flat] == [0, 2, 1, 3]


def _makes_heads(rows: Any, heads: Any) -> bool:
    """Return True if a view only makes heads of the columns of rows (B, S, N)."""
    if not isinstance(rows, torch.Tensor) or not isinstance(heads, torch.Tensor):
        return False
    if (rows.dim(), heads.dim()) != (3, 4) or type(heads.shape[2]) is not int:
        return False
    return all(map(same_size, rows.shape[:2], heads.shape[:2]))
