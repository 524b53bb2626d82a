"""Finds heads that are rotated behind their norm, as in Hugging Face's Qwen 3, Gemma 3 and OLMo 2:
norm and rotation become one operator of the packages of `rms_norm_rope`.

This works on graphs before autograd, whose norms are operators of a package already. A kernel reads
cos and sin of the first half of the columns alone, so the graph has to show that the second half is
the same.
"""

from __future__ import annotations

import logging
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from ..serve.checks import FLOATS
from ..shape_names import rotation_name
from .equal_halves import EqualHalves
from .graph_values import (
    add_call,
    change_graphs,
    in_one_place,
    is_dense,
    may_train,
    same_size,
    value_of,
)
from .graph_writes import are_pure_between
from .rope_node import rms_norm_rope_forward
from .rotation_reader import Heads, Rotation, read_rotation
from .routes import arguments_of, getitems

_aten = torch.ops.aten
_log = logging.getLogger(__name__)


def fuse_rotations(module: GraphModule, operators: Any) -> int:
    """Replace the norms of heads and the rotations behind them, also in the graphs that one calls,
    where the packages of `rms_norm_rope` have kernels. Returns how many. Nothing else takes what is
    in between."""
    if not operators.rotated:
        return 0
    functions = import_module(operators.rotated).functions
    alike = EqualHalves(module)

    def change(graph: torch.fx.Graph) -> int:
        order = {node: i for i, node in enumerate(graph.nodes)}
        found = [one for node in order if (one := read_rotation(node, operators)) is not None]
        return sum(_fuse(graph, *one, order, alike, functions) for one in found)

    fused = change_graphs(module, change)
    if fused:
        _log.info("joined %d norms of heads and the rotary embeddings behind them", fused)
    return fused


def _fuse(
    graph: torch.fx.Graph,
    turned: Rotation,
    heads: Heads,
    order: dict[Node, int],
    alike: EqualHalves,
    functions: Any,
) -> bool:
    x, weight, eps, offset, _ = arguments_of(heads.norm).values()
    rows, scale, result = value_of(x), value_of(weight), value_of(turned.result)
    nodes = turned.nodes | heads.nodes
    if len(getitems(heads.norm)) != 1 or len(heads.norm.users) != 1:
        return False
    if type(rows) is not FakeTensor or type(rows.shape[-1]) is not int:
        return False
    if any(not nodes.issuperset(node.users) for node in nodes - {turned.result}):
        return False
    numbers = (turned.cos, turned.sin)
    fits = all(_fits(one, turned, heads) and alike(one) for one in numbers)
    if not fits or result.dtype != rows.dtype or eps is None:
        return False
    if not is_dense(result, (0, 2, 1, 3) if heads.transposed else (0, 1, 2, 3)):
        return False  # as rows behind the norm, which parts that are joined are not
    if not in_one_place((heads.norm, turned.result)):
        return False
    if not are_pure_between(heads.norm, turned.result):
        return False
    rotation = rotation_name(turned.columns, rows.shape[-1], joined=heads.joined)
    if heads.joined and turned.columns != value_of(turned.x).shape[-1]:
        return False
    trains = may_train(graph, (x, weight))
    if not functions.serves(rows, scale, rotation, offset != 0, trains):
        return False
    name = functions.form_named(joined=heads.joined)
    _replace(graph, turned, heads, (x, weight, eps, offset, name))
    for node in sorted(nodes, key=order.__getitem__, reverse=True):
        graph.erase_node(node)
    graph.erase_node(heads.norm)
    return True


def _fits(number: Node, turned: Rotation, heads: Heads) -> bool:
    """Return True for cos or sin of every token, the same for all of its heads."""
    value, x = value_of(number), value_of(turned.x)
    if type(value) is not FakeTensor or value.dim() != 4 or value.dtype not in FLOATS:
        return False
    at_heads, at_tokens = (1, 2) if heads.transposed else (2, 1)
    along = all(
        same_size(value.shape[i], 1) or same_size(value.shape[i], x.shape[i])
        for i in (0, at_tokens)
    )
    whole = same_size(value.shape[-1], turned.columns) and same_size(value.shape[at_heads], 1)
    return along and whole and not value.requires_grad and value.device == x.device


def _replace(
    graph: torch.fx.Graph, turned: Rotation, heads: Heads, of_norm: tuple[Any, ...]
) -> None:
    """Put the operator in front of a rotation's result, and let all users of that take its own."""
    last, (x, weight, eps, offset, name) = turned.result, of_norm
    dtypes = {value_of(one).dtype for one in (turned.cos, turned.sin)}
    kept = len(dtypes) == 1 and dtypes <= {value_of(x).dtype, torch.float32}

    call = partial(add_call, graph, last)

    def half(number: Node) -> Node:
        first = call(_aten.slice.Tensor, number, 3, 0, turned.columns // 2)
        first = call(_aten.transpose.int, first, 1, 2) if heads.transposed else first
        return first if kept else call(_aten.to.dtype, first, torch.float32)

    with graph.inserting_before(last):
        rows = call(_aten.unsqueeze.default, x, -2) if heads.joined else x
        given = (rows, weight, half(turned.cos), half(turned.sin), eps, offset, name)
        y = call(rms_norm_rope_forward, *given)
        if heads.joined:
            width = value_of(turned.x).shape[-1]
            y = call(_aten.squeeze.dim, y, -2)
            y = call(_aten.unflatten.int, y, -1, [value_of(y).shape[-1] // width, width])
        y = call(_aten.transpose.int, y, 1, 2) if heads.transposed else y
    y.meta = dict(last.meta)
    last.replace_all_uses_with(y)
