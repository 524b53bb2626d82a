"""Quantization to FP8 in FX graphs, behind a norm and behind its backward: with it, the operator
becomes that of the packages of `rms_norm_quantized`.

A recipe quantizes inside autograd functions, so this works on graphs behind autograd. What is
quantized is rounded to its dtype before, as the recipe has it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch.fx import Node

from ..operations import BACKWARD_FORMATS, FORMATS, STREAM_FORMATS
from ..serve.options import DTYPES
from .additions import fold_additions
from .graph_values import HALF, VALUES, add_call, are_alike, in_one_place, value_of
from .quantization_reader import Quantization, read_quantization
from .quantized_backward import rms_norm_backward_quantized
from .quantized_node import add_rms_norm_quantized_forward, rms_norm_quantized_forward
from .routes import INPUTS, arguments_of, calls_of, getitems
from .sums import computes_alone

FORMAT = "fp8_1x128"
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


def fold_beside(graph: torch.fx.Graph, operators: Any) -> tuple[int, int]:
    """Fold what stands beside the norms of a package into its operators: additions, as
    `fold_additions` does, and quantizations in blocks of 128 columns of a norm's result and of dx,
    where there are kernels for that. Returns how many of each."""
    additions = fold_additions(graph, operators)
    quantized = _fold(graph, operators, "rms_norm", _fold_behind_norm)
    quantized += _fold(graph, operators, "add_rms_norm", _fold_behind_norm)
    quantized += _fold(graph, operators, "rms_norm_backward", _fold_behind_backward)
    return additions, quantized


def _fold(
    graph: torch.fx.Graph, operators: Any, name: str, fold: Callable[[Node, Node, Any], bool]
) -> int:
    functions = functions_beside(operators)
    if functions is None:
        return 0
    calls = calls_of(graph, operators.package, getattr(operators, name))
    items = ((call, _only_item(call)) for call in calls)
    return sum(item is not None and fold(call, item, functions) for call, item in items)


def serves_behind(operators: Any, x: Any, weight: Any, offset: bool) -> bool:
    """Return True if norms of rows like x and their quantization are one kernel."""
    functions = functions_beside(operators)
    formats = [FORMATS[FORMAT]]
    return functions is not None and functions.have_kernels(x, weight, formats, offset=offset)


def _only_item(node: Node) -> Node | None:
    """Return the node that takes the first result, where all results are taken by nodes."""
    items = getitems(node)
    firsts = [item for item in items if item.args[1] == 0]
    return firsts[0] if len(firsts) == 1 and len(items) == len(node.users) else None


def _fold_behind_norm(norm: Node, y: Node, functions: Any) -> bool:
    x, *residual, weight, eps, offset, _ = arguments_of(norm).values()
    rows, alike = value_of(x), all(are_alike(value_of(x), value_of(one)) for one in residual)
    if isinstance(eps, Node) or not isinstance(rows, torch.Tensor) or not alike:
        return False
    quantized = _read(norm, y)
    if quantized is None:
        return False
    has_kernels = partial(functions.have_kernels, rows, value_of(weight), offset=offset != 0)
    eps = _FP32_EPS if eps is None else eps
    call = (eps, offset, FORMAT, quantized.keeps_rows, True, False, functions.name)
    if residual and has_kernels([STREAM_FORMATS[FORMAT]]):
        stream = (x, *residual, weight)
        new = _call_beside(norm, add_rms_norm_quantized_forward, *stream, *call)
    elif has_kernels([FORMATS[FORMAT]]):
        # Less moves than with the sum in the norm and the quantization in a kernel of its own.
        x = _sum_before(norm, x, *residual) if residual else x
        new = _call_beside(norm, rms_norm_quantized_forward, x, weight, *call)
    else:
        return False
    _replace(norm, new, {0: 3, 1: 2, 2: 4}, quantized, (0, 1))
    return True


def _sum_before(norm: Node, x: Node, residual: Node) -> Node:
    """Let PyTorch add what a norm adds. Returns the sum, which goes to all that take it."""
    total = _call_beside(norm, torch.ops.aten.add.Tensor, x, residual)
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
    quantized = _read(backward, dx)
    residual = "" if dresidual is None else DTYPES.get(value_of(dresidual).dtype)
    if quantized is None or residual is None:
        return False
    offset = given["weight_offset"]
    asked = (value_of(x), value_of(weight), [BACKWARD_FORMATS[FORMAT]])
    if not functions.have_kernels(*asked, offset=offset != 0, residual=residual):
        return False
    rows = (given["dy"], x, given["rstd"], weight, dresidual)
    call = (offset, FORMAT, True, False, functions.name)
    new = _call_beside(backward, rms_norm_backward_quantized, *rows, *call)
    _replace(backward, new, {0: 0, 1: 3, 2: 4}, quantized, (1, 2))
    return True


def _read(call: Node, rows: Node) -> Quantization | None:
    """Return how a result of a call is quantized, where the call may do that, too."""
    found = read_quantization(rows)
    if found is None:
        return None
    ends = (*found.narrow, *found.scales)
    return found if all(_is_beside(call, end) and _sizes(end) for end in ends) else None


def _is_beside(call: Node, end: Node) -> bool:
    """Return True if nothing is between a call and what is made of it, and both run in one place.
    What an autograd function computes has no mark of the half of a step that it is in."""
    same_half = end.meta.get(HALF) in (None, call.meta.get(HALF))
    return same_half and in_one_place((call, end), but=HALF) and computes_alone(call, end)


def _sizes(node: Node) -> list[int] | None:
    """Return the sizes of a tensor, -1 for one that tracing does not know; None for several."""
    sizes = [size if isinstance(size, int) else -1 for size in value_of(node).shape]
    return sizes if sizes.count(-1) < 2 else None


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
        for end in ends:
            with graph.inserting_before(end):
                item = add_call(graph, end, operator.getitem, new, place)
                viewed = add_call(graph, end, torch.ops.aten.view.default, item, _sizes(end))
            viewed.meta |= {key: end.meta[key] for key in VALUES if key in end.meta}
            end.replace_all_uses_with(viewed)
    graph.erase_node(old)
    for node in reversed(found.nodes):
        if not node.users:
            graph.erase_node(node)
