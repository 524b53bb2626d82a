"""Reads how a graph quantizes rows to FP8 in blocks of 128 columns, as DeepSeek-V3 does, in
whatever spelling: `y / s`, `y * (1 / s)` or `y * (448 / amax)` with s = amax / 448, where amax is
the largest magnitude of a block."""

from __future__ import annotations

import operator
from math import isclose
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ..operations.rmsnorm_quantized import LARGEST
from .graph_values import is_contiguous, same_size, value_of
from .spellings import argument, cast_of, keeps_numbers, kind

BLOCK = 128
_MOST_FLOOR = 1e-4
"""The magnitudes below which a recipe's amax is clamped are at most so large; DeepGEMM's are."""
_WIDE = (torch.float32, torch.float64)


class Quantization(NamedTuple):
    """Rows that are quantized: the nodes with the result, those with the scales that others take,
    whether others take the rows as they were, and all nodes from these on, in their order."""

    narrow: list[Node]
    scales: list[Node]
    keeps_rows: bool
    nodes: list[Node]


class _Rows(NamedTuple):
    """The rows, or `magnitudes` of them, or the `places` of the largest, or the rows, `scaled` by
    their blocks."""

    what: str = ""


class _Blocks(NamedTuple):
    """A number for each block: factor * amax ^ power."""

    factor: float = 1.0
    power: int = 1


_SCALES, _INVERSE = _Blocks(1 / LARGEST), _Blocks(LARGEST, -1)


def read_quantization(rows: Node) -> Quantization | None:
    """Return how a graph quantizes a node, once or, for several products, more often. None if
    something else takes what is in between."""
    value = value_of(rows)
    if not isinstance(value, torch.Tensor) or not value.dim() or not is_contiguous(value):
        return None
    width = value.shape[-1]
    if not isinstance(width, int) or width % BLOCK:
        return None
    found: dict[Any, Any] = {rows: _Rows()}
    narrow, node = list[Node](), rows
    waiting = set(rows.users)
    while waiting:
        node = node.next
        if node not in waiting:
            continue
        waiting.remove(node)
        meaning = _meaning(node, found)
        if meaning is None:
            continue
        if _is_narrow(node):
            narrow.append(node)
            continue
        found[node] = meaning
        waiting |= node.users.keys()
    return _as_whole(rows, narrow, found)


def _as_whole(rows: Node, narrow: list[Node], found: dict[Any, Any]) -> Quantization | None:
    if not narrow or any(found[node.args[0]] != _Rows("scaled") for node in narrow):
        return None
    inside = found.keys() | set(narrow)
    left = [node for node in found if not inside.issuperset(node.users)]
    scales = [node for node in left if _is_scale(found[node])]
    others = set(left).difference(scales)
    if any(found[node] != _Rows() for node in others):
        return None
    if any(value_of(node).dtype != torch.float32 for node in scales):
        return None
    return Quantization(narrow, scales, bool(others), [*found, *narrow])


def _is_narrow(node: Node) -> bool:
    return getattr(value_of(node), "dtype", None) == torch.float8_e4m3fn


def _meaning(node: Node, found: dict[Any, Any]) -> Any:
    """Return what a node computes of the rows; None for anything else."""
    value = value_of(node)
    if node.target is operator.getitem and kind(node.args[0]) == "largest and place":
        return found.get(node.args[0]) if node.args[1] == 0 else _Rows("places")
    if kind(node) == "largest and place":
        return _Blocks() if _over_blocks(node, found) else None
    if not isinstance(value, torch.Tensor):
        return None
    source = found.get(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
    match kind(node):
        case "cast":
            return source if _is_kept(node, source, next(iter(found))) else None
        case "viewed" | "unsqueezed" | "squeezed" if source is not None:
            return source if value.dtype == value_of(node.args[0]).dtype else None
        case "magnitude" if source == _Rows():
            return _Rows("magnitudes")
        case "largest" if _over_blocks(node, found):
            return _Blocks()
        case "clamped":
            return source if _is_clamp(node, source) else None
        case "reciprocal" if isinstance(source, _Blocks):
            return _wide(value, _Blocks(1 / source.factor, -source.power))
        case "quotient" | "product" if len(node.args) == 2:
            return _wide(value, _result(node, found))
    return None


def _wide(value: torch.Tensor, meaning: Any) -> Any:
    return meaning if value.dtype in _WIDE else None


def _is_kept(node: Node, source: Any, rows: Node) -> bool:
    """Return True for a cast that changes no number, and for that of the scaled rows to FP8. The
    largest magnitudes are numbers of the rows' dtype."""
    before = cast_of(node)
    if before is None:
        return False
    one, two = value_of(before).dtype, value_of(node).dtype
    if two == torch.float8_e4m3fn:
        return source == _Rows("scaled")
    if isinstance(source, _Blocks) and one == torch.float64 and two == torch.float32:
        return True
    return keeps_numbers(value_of(rows).dtype if source == _Blocks() else one, two)


def _over_blocks(node: Node, found: dict[Any, Any]) -> bool:
    """Return True for the largest of each 128 columns of the rows' magnitudes."""
    taken = node.args[0]
    if found.get(taken) != _Rows("magnitudes"):
        return False
    shape = value_of(taken).shape
    dims = argument(node, 1, "dim")
    dims = dims if isinstance(dims, list | tuple) else [dims]
    return len(shape) > 1 and same_size(shape[-1], BLOCK) and dims in ([-1], [len(shape) - 1])


def _is_clamp(node: Node, source: Any) -> bool:
    """Return True for magnitudes that are clamped to more than nothing, and for scaled rows that
    are clamped to what FP8 has."""
    name = str(getattr(node.target, "__name__", node.target)).split(".")[0]
    ends = {"clamp_min": ("min",), "clamp_max": ("max",)}.get(name, ("min", "max"))
    limits = {end: argument(node, place, end) for place, end in enumerate(ends, 1)}
    least, most = limits.get("min"), limits.get("max")
    if any(not isinstance(one, int | float) for one in (least, most) if one is not None):
        return False
    if source == _Rows("scaled"):
        return least in (None, -LARGEST) and most in (None, LARGEST)
    small = least is None or 0 <= least <= _MOST_FLOOR
    return source == _Blocks() and small and most in (None, float("inf"))


def _result(node: Node, found: dict[Any, Any]) -> Any:
    """Return what a quotient or a product of two things is."""
    one, other = node.args
    divided = kind(node) == "quotient"
    left, right = (found.get(each) if isinstance(each, Node) else each for each in node.args)
    if isinstance(left, _Blocks) and isinstance(right, int | float) and right:
        return left._replace(factor=left.factor / right if divided else left.factor * right)
    if isinstance(left, int | float) and isinstance(right, _Blocks):
        if divided:
            return _Blocks(left / right.factor, -right.power)
        return right._replace(factor=left * right.factor)
    if not divided and isinstance(left, _Blocks):
        left, right, one, other = right, left, other, one
    if left == _Rows() and isinstance(right, _Blocks) and _are_blocks(one, other):
        inverse = _Blocks(1 / right.factor, -right.power) if divided else right
        return _Rows("scaled") if _is_like(inverse, _INVERSE) else None
    return None


def _are_blocks(rows: Any, numbers: Any) -> bool:
    """Return True if a number stands beside each 128 columns of the rows."""
    one, two = value_of(rows).shape, value_of(numbers).shape
    if len(one) != len(two) or not same_size(one[-1], BLOCK) or not same_size(two[-1], 1):
        return False
    return all(map(same_size, one[:-1], two[:-1]))


def _is_scale(meaning: Any) -> bool:
    return isinstance(meaning, _Blocks) and _is_like(meaning, _SCALES)


def _is_like(one: _Blocks, other: _Blocks) -> bool:
    """Return True for the same numbers but for how a constant was rounded to fp32."""
    return one.power == other.power and isclose(one.factor, other.factor, rel_tol=1e-7)
