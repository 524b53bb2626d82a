"""Quantization to FP8 in FX graphs, behind a norm and behind its backward: with it, the operator
becomes that of the packages of `rms_norm_quantized`.

A recipe quantizes inside autograd functions, so this works on graphs behind autograd. What is
quantized is rounded to its dtype before, as the recipe has it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch.fx import Node

from ..operations import BACKWARD_FORMATS, FORMATS, STREAM_FORMATS, RowOperation
from ..serve.options import DTYPES
from .additions import fold_additions
from .graph_values import (
    HALF,
    VALUES,
    add_call,
    are_alike,
    has_shape,
    in_one_place,
    is_contiguous,
    same_size,
    value_of,
)
from .graph_writes import is_pure_operator, may_be_a_view
from .quantization_reader import Quantization, read_quantization, sizes_of
from .quantized_backward import rms_norm_backward_quantized
from .quantized_node import add_rms_norm_quantized_forward, rms_norm_quantized_forward
from .routes import INPUTS, arguments_of, calls_of, getitems
from .sums import computes_alone

FORMAT = "fp8_1x128"
Formats = Mapping[str, RowOperation]
_aten: Any = torch.ops.aten
_FP32_EPS = torch.finfo(torch.float32).eps


def functions_beside(operators: Any) -> Any:
    """Return the functions of `rms_norm_quantized` into whose operators a pass puts norms; None for
    a package that has none beside it."""
    name = getattr(operators, "quantized", "")
    return import_module(name).functions if name else None


def missing_quantized(operators: Any) -> list[str]:
    """Say which kernels that quantize there are beside a package's: for each operation, why there
    are none, "" where there are."""
    functions = functions_beside(operators)
    formats = () if functions is None else (FORMATS, STREAM_FORMATS, BACKWARD_FORMATS)
    return [functions.server(some[FORMAT]).missing for some in formats]


def fold_beside(
    graph: torch.fx.Graph, operators: Any, behind_autograd: bool = True
) -> tuple[int, int]:
    """Fold what stands beside the norms of a package into its operators: additions, as
    `fold_additions` does, and quantizations in blocks of 128 columns of a norm's result and of dx,
    where there are kernels for that. Returns how many of each. behind_autograd: whether no gradient
    is computed of what runs the graph: none flows through an operator that quantizes."""
    additions, quantized = fold_additions(graph, operators), 0
    functions = functions_beside(operators)
    if functions is not None and behind_autograd:
        for name, fold in (
            ("rms_norm", _fold_behind_norm),
            ("add_rms_norm", _fold_behind_norm),
            ("rms_norm_backward", _fold_behind_backward),
        ):
            for call in calls_of(graph, operators.package, getattr(operators, name)):
                rows = _only_item(call)
                quantized += rows is not None and fold(call, rows, functions)
    return additions, quantized


def serves_behind(operators: Any, x: Any, weight: Any, offset: bool) -> bool:
    """Return True if norms of rows like x and their quantization are one kernel."""
    functions = functions_beside(operators)
    return functions is not None and _serves(functions, x, weight, FORMATS, offset)


def _serves(
    functions: Any, x: Any, weight: Any, formats: Formats, offset: bool, **options: Any
) -> bool:
    if weight is not None and (weight.dim() != 1 or not same_size(weight.shape[0], x.shape[-1])):
        return False
    served: bool = functions.have_kernels(x, weight, [formats[FORMAT]], offset=offset, **options)
    return served


def _only_item(node: Node) -> Node | None:
    """Return the node that takes the first result, where all results are taken by nodes."""
    items = getitems(node)
    firsts = [item for item in items if item.args[1] == 0]
    return firsts[0] if len(firsts) == 1 and len(items) == len(node.users) else None


def _fold_behind_norm(norm: Node, y: Node, functions: Any) -> bool:
    x, *residual, weight, eps, offset, _ = arguments_of(norm).values()
    rows, stream = value_of(x), [value_of(one) for one in residual]
    if isinstance(eps, Node) or not isinstance(rows, torch.Tensor):
        return False
    found = _read(norm, y)
    if found is None or not all(are_alike(rows, one) for one in stream):
        return False
    serves = partial(_serves, functions, rows, value_of(weight), offset=offset != 0)
    eps = _FP32_EPS if eps is None else eps
    call = (eps, offset, FORMAT, found.keeps_rows, True, found.powers, functions.name)
    if residual and serves(formats=STREAM_FORMATS):
        new = _call_beside(norm, add_rms_norm_quantized_forward, x, *residual, weight, *call)
    elif serves(formats=FORMATS) and (not residual or all(map(is_contiguous, (rows, *stream)))):
        # Less moves than with the sum in the norm and the quantization in a kernel of its own.
        x = _sum_before(norm, x, *residual) if residual else x
        new = _call_beside(norm, rms_norm_quantized_forward, x, weight, *call)
    else:
        return False
    _replace(norm, new, {0: 3, 1: 2, 2: 4}, found, (0, 1))
    return True


def _sum_before(norm: Node, x: Node, residual: Node) -> Node:
    """Let PyTorch add what a norm adds. Returns the sum, which goes to all that take it."""
    total = _call_beside(norm, _aten.add.Tensor, x, residual)
    for item in (item for item in getitems(norm) if item.args[1] == 2):
        item.replace_all_uses_with(total)
        norm.graph.erase_node(item)
    return total


def _fold_behind_backward(backward: Node, dx: Node, functions: Any) -> bool:
    given = arguments_of(backward)
    x, weight, dresidual = given["x"], given["weight"], given["dresidual"]
    wanted = given["need_dx"] and (given["need_dw"] or weight is None)
    if not wanted or given["dw_dtype"] is not None or not isinstance(value_of(x), torch.Tensor):
        return False
    found = _read(backward, dx)
    residual = "" if dresidual is None else DTYPES.get(value_of(dresidual).dtype)
    if found is None or residual is None:
        return False
    offset = given["weight_offset"]
    asked = (functions, value_of(x), value_of(weight), BACKWARD_FORMATS, offset != 0)
    if not _serves(*asked, residual=residual):
        return False
    rows = (given["dy"], x, given["rstd"], weight, dresidual)
    call = (offset, FORMAT, True, found.powers, functions.name)
    new = _call_beside(backward, rms_norm_backward_quantized, *rows, *call)
    _replace(backward, new, {0: 0, 1: 3, 2: 4}, found, (1, 2))
    return True


def _read(call: Node, rows: Node) -> Quantization | None:
    """Return how a result of a call is quantized, where the call may do that, too."""
    found = read_quantization(rows)
    return None if found is None else found.of(lambda end: _is_beside(call, end))


def _is_beside(call: Node, end: Node) -> bool:
    """Return True if nothing is between a call and what is made of it, and both run in one place.
    What an autograd function computes has no mark of the half of a step that it is in."""
    same_half = end.meta.get(HALF) in (None, call.meta.get(HALF))
    return same_half and in_one_place((call, end), but=HALF) and computes_alone(call, end)


def _call_beside(node: Node, target: Any, *arguments: Any) -> Node:
    with node.graph.inserting_before(node):
        new = add_call(node.graph, node, target, *arguments)
    new.meta.pop(INPUTS, None)
    return new


def _replace(
    old: Node,
    new: Node,
    results: dict[Any, int],
    found: Quantization,
    narrow: tuple[int, int],
) -> None:
    """Give what takes the results of an old call those of a new one. results: the new places of
    old results; narrow: the places of what is quantized and of its scales."""
    graph, value = old.graph, value_of(new)
    for item in getitems(old):
        place = results[item.args[1]]
        item.args = (new, place)
        if "val" in item.meta and value is not None:
            item.meta["val"] = value[place]
    for ends, place in zip((found.narrow, found.scales), narrow, strict=True):
        _give(sorted(ends, key=_leaves, reverse=True), new, place)
    graph.erase_node(old)
    for node in reversed(found.nodes):
        if not node.users:
            graph.erase_node(node)


def _give(ends: list[Node], call: Node, place: int) -> None:
    """Put a result of a call in the place of nodes, those that leave the graph first. If there are
    such, no two of them become views of one memory."""
    graph, made = call.graph, dict[Node, Node]()
    for end in ends:
        apart = bool(made) and _leaves(ends[0])
        with graph.inserting_before(end if apart else call.next):
            source = made[ends[0]] if apart else add_call(graph, end, operator.getitem, call, place)
            shape = value_of(end).shape
            if value_of(source) is None or not has_shape(value_of(source), shape):
                source = add_call(graph, end, _aten.view.default, source, sizes_of(value_of(end)))
            if apart:
                source = add_call(graph, end, _aten.clone.default, source)
        # With the memory of the end, which others are views of: Inductor drops copies of what does
        # not share memory with a result.
        source.meta |= {key: end.meta[key] for key in VALUES if key in end.meta}
        made[end] = source
    for end, source in made.items():
        end.replace_all_uses_with(source)


def _leaves(node: Node) -> bool:
    """Return True if a tensor or a view of it is a result of the graph, or may be written to."""
    for user in node.users:
        if user.op == "output" or not (user.target is operator.getitem or is_pure_operator(user)):
            return True
        if may_be_a_view(user) and _leaves(user):
            return True
    return False
