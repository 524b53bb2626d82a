"""Leaves a norm of PyTorch to Inductor, in a graph whose other norms stay whole: written out, it is
fused with what stands beside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .graph_values import add_call, value_of

_aten = torch.ops.aten
_NORMS = (torch.nn.functional.rms_norm, torch.rms_norm)
_NAMES = ("input", "normalized_shape", "weight", "eps")
_NARROW = (torch.bfloat16, torch.float16, torch.float32)


def write_out(module: GraphModule, is_routed: Callable[..., bool]) -> int:
    """Write those of PyTorch's RMSNorms out that are not to be routed. Returns how many. is_routed:
    as Worth. It decides about norms over one dimension, whose weight has the dtype of the rows."""
    graph, written = module.graph, 0
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _NORMS:
            continue
        given = {**dict(zip(_NAMES, node.args, strict=False)), **node.kwargs}
        x, weight = given["input"], given.get("weight")
        if not _is_plain(value_of(x), value_of(weight), given) or is_routed(
            x, weight, 0.0, [node], node
        ):
            continue
        with graph.inserting_before(node):
            made = _written_out(graph, node, x, weight, given.get("eps"))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)
        written += 1
    if written:
        graph.lint()
        module.recompile()
    return written


def _is_plain(rows: Any, scale: Any, given: dict[str, Any]) -> bool:
    if not isinstance(rows, torch.Tensor) or rows.dtype not in _NARROW:
        return False
    if given.get("weight") is not None and getattr(scale, "dtype", None) != rows.dtype:
        return False
    return len(given["normalized_shape"]) == 1


def _written_out(graph: torch.fx.Graph, node: Node, x: Node, weight: Node | None, eps: Any) -> Node:
    """Add the nodes that Inductor makes of PyTorch's norm. Returns the last."""

    call = partial(add_call, graph, node)
    number = torch.finfo(torch.float32).eps if eps is None else eps
    wide = call(_aten.to.dtype, x, torch.float32)
    mean = call(_aten.mean.dim, call(_aten.pow.Tensor_Scalar, wide, 2), [-1], True)
    y = call(
        _aten.mul.Tensor, wide, call(_aten.rsqrt.default, call(_aten.add.Scalar, mean, number))
    )
    if weight is not None:
        y = call(_aten.mul.Tensor, y, weight)
    return call(_aten.to.dtype, y, value_of(x).dtype)
