"""Finds heads that are rotated as complex numbers, as torchtitan, and Hugging Face's Llama 4 and
DeepSeek V2, write it: the product of neighbouring columns with cos + i sin becomes one operator of
the packages of `rope`.

Inductor generates no code for complex numbers: the cast, the product and the cast back are kernels
of their own there. The pass works on graphs before autograd, where the operator has a backward, and
on traced steps, whose backward multiplies with the conjugate.
"""

from __future__ import annotations

import logging
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from ..shape_names import rotation_name
from .graph_values import add_call, change_graphs, in_one_place, is_dense, same_size, value_of
from .graph_writes import are_pure_between
from .rotary_node import rope
from .spellings import cast_of, kind, only_user, other_factor, widened

_aten = torch.ops.aten
_LAZY = ("conj", torch.conj, _aten._conj.default)
"""Conjugates that are views."""
_log = logging.getLogger(__name__)


class Turned(NamedTuple):
    """Heads that are rotated: x, the complex numbers that they are multiplied with, the product,
    and all nodes of which the result is made, in their order, with itself as the last one."""

    x: Node
    angles: Angles
    product: Node
    nodes: list[Node]

    @property
    def result(self) -> Node:
        return self.nodes[-1]


class Angles(NamedTuple):
    """Complex numbers as they are multiplied; those of which they are copies or conjugates; 1, or
    -1 for conjugates; and the first copy, if there is one."""

    multiplied: Node
    base: Node
    sign: float
    copy: Node | None


Made = dict[tuple[Node, bool, float], tuple[Node, Node, Node]]
"""cos and sin that a graph has already, and the last rotation by them: of complex numbers, whether
their heads are transposed, and of a sign."""


def fuse_complex_rotations(module: GraphModule, operators: Any) -> int:
    """Replace rotations by complex numbers, also in the graphs that one calls, where the packages
    of `rope` have a kernel. Returns how many. Nothing else takes what is in between."""
    if not operators.rotated:
        return 0
    functions = import_module(operators.rotated).functions

    def change(graph: torch.fx.Graph) -> int:
        products = [node for node in graph.nodes if kind(node) == "product"]
        made: Made = {}
        read = map(_read, products)  # each in its turn: it may be of another's result
        return sum(_fuse(graph, one, functions, made) for one in read if one is not None)

    fused = change_graphs(module, change)
    if fused:
        _log.info("gave %d rotations by complex numbers to the packages of rope", fused)
    return fused


def _read(product: Node) -> Turned | None:
    """Return the rotation that a product of complex numbers is part of."""
    if len(product.users) != 1:
        return None
    for one in product.all_input_nodes:
        numbers: Any = other_factor(product, one) if kind(one) == "complex" else None
        pairs: Any = one.args[0] if numbers is not None else None
        if kind(pairs) == "viewed":
            wide: Any = pairs.args[0]
            x = widened(wide)
            before = [pairs, one, product] if x is wide else [wide, pairs, one, product]
            return _with_its_result(x, _angles(numbers), before)
    return None


def _angles(numbers: Node) -> Angles:
    base, sign, copy = numbers, 1.0, None
    while kind(base) in ("conjugate", "copied"):
        sign = -sign if kind(base) == "conjugate" else sign
        copy = base if base.target not in _LAZY else copy
        (base,) = base.all_input_nodes
    return Angles(numbers, base, sign, copy)


def _with_its_result(x: Node, angles: Angles, nodes: list[Node]) -> Turned | None:
    product = nodes[-1]
    (real,) = product.users
    flat = only_user(real) if kind(real) == "real" else None
    if flat is None or kind(flat) != "viewed":
        return None
    nodes = [*nodes, real, flat]
    seen = (x, angles.multiplied, angles.base, *nodes)
    if not all(isinstance(value_of(node), torch.Tensor) for node in seen):
        return None
    dtype, last = value_of(x).dtype, only_user(flat)
    if value_of(flat).dtype != dtype and last is not None and cast_of(last) is flat:
        nodes.append(last)
    fits = value_of(nodes[-1]).dtype == dtype
    return Turned(x, angles, product, nodes) if fits else None


def _fuse(graph: torch.fx.Graph, turned: Turned, functions: Any, made: Made) -> bool:
    rows, result, nodes = value_of(turned.x), value_of(turned.result), turned.nodes
    orders = {False: (0, 1, 2, 3), True: (0, 2, 1, 3)}
    transposed = next((at for at in orders if _fits(turned, at_heads=2 - at)), None)
    if transposed is None or not is_dense(result, orders[transposed]):
        return False
    if any(user not in nodes for node in nodes[:-1] for user in node.users):
        return False
    if not in_one_place(nodes) or not are_pure_between(nodes[0], turned.result):
        return False
    copy = turned.angles.copy
    if copy is not None and not are_pure_between(copy, turned.result):
        return False
    if not functions.rotates(rows, rotation_name(rows.shape[-1], rows.shape[-1], True)):
        return False
    _replace(graph, turned, transposed, functions.form_named(interleaved=True), made)
    return True


def _fits(turned: Turned, at_heads: int) -> bool:
    """Return True for numbers of every token, one for each pair of columns, the same for all of its
    heads, which stand in a dimension."""
    x, product, base = map(value_of, (turned.x, turned.product, turned.angles.base))
    angles = value_of(turned.angles.multiplied)
    if any(type(one) is not FakeTensor for one in (x, angles, product)) or x.dim() != 4:
        return False
    if type(x.shape[-1]) is not int or base.requires_grad:
        return False
    if not angles.dtype == product.dtype == torch.complex64 or base.is_conj():
        return False
    pairs = [*x.shape[:-1], x.shape[-1] // 2]
    of_tokens = [*pairs[:at_heads], 1, *pairs[at_heads + 1 :]]
    along = [same_size(angles.shape[0], 1) or same_size(angles.shape[0], pairs[0])]
    along += map(same_size, angles.shape[1:], of_tokens[1:])
    along += map(same_size, product.shape, pairs)
    along += map(same_size, value_of(turned.result).shape, x.shape)
    return angles.dim() == product.dim() == 4 and all(along) and angles.device == x.device


def _replace(
    graph: torch.fx.Graph, turned: Turned, transposed: bool, name: str, made: Made
) -> None:
    """Put the operator in front of a rotation's result, and let all users of that take its own."""
    last, (numbers, angles, sign, _) = turned.result, turned.angles
    call = partial(add_call, graph, last)
    known, before = list[Node](), made.get((angles, transposed, sign))
    if before is not None and in_one_place((before[2], last)):
        known = [*before[:2]] if are_pure_between(before[2], last) else []
    with graph.inserting_before(last):
        if not known:
            parts = call(_aten.view_as_real.default, angles)
            known = [
                call(_aten.clone.default, call(_aten.select.int, parts, -1, i)) for i in (0, 1)
            ]
            known = [call(_aten.transpose.int, one, 1, 2) if transposed else one for one in known]
        rows = call(_aten.transpose.int, turned.x, 1, 2) if transposed else turned.x
        rotated = y = call(rope, rows, *known, sign, name)
        y = call(_aten.transpose.int, y, 1, 2) if transposed else y
    made[angles, transposed, sign] = (known[0], known[1], rotated)
    y.meta = dict(last.meta)
    last.replace_all_uses_with(y)
    for node in reversed(turned.nodes):
        graph.erase_node(node)
    while numbers is not angles and not numbers.users:
        (source,) = numbers.all_input_nodes
        graph.erase_node(numbers)
        numbers = source
