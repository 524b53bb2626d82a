"""Reads how a graph quantizes rows to FP8 in blocks of 128 columns, as DeepSeek-V3 does, in
whatever spelling: `y / s`, `y * (1 / s)` or `y * (448 / amax)` with s = amax / 448, where amax is
the largest magnitude of a block. s may be rounded up to a power of two."""

from __future__ import annotations

import operator
from collections.abc import Callable
from math import inf, isclose
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ..operations.rmsnorm_quantized import LARGEST
from .graph_values import has_shape, is_contiguous, same_size, value_of
from .powers_of_two import POWER_OF_TWO, SCALE, Step, step_of
from .spellings import argument, cast_of, keeps_numbers, kind, limits_of

BLOCK = 128
_MOST_FLOOR = 1e-4
"""The magnitudes below which a recipe's amax is clamped are at most so large; DeepGEMM's are."""
_VIEWS = ("viewed", "unsqueezed", "squeezed", "detached")
_WIDE = (torch.float32, torch.float64)
_WHOLE = (None, Ellipsis, slice(None))
"""Indices that take all of a dimension, or add one."""


class Quantization(NamedTuple):
    """Rows that are quantized: the nodes with the result, those with the scales, and all that read
    the rows on the way there, from the rows on, in their order. powers: scales are powers of
    two."""

    narrow: list[Node]
    scales: list[Node]
    nodes: list[Node]
    powers: bool

    @property
    def keeps_rows(self) -> bool:
        """True if something takes the rows though the result and the scales come from elsewhere."""
        ends, read, kept = {*self.narrow, *self.scales}, set(self.nodes), set[Node]()
        for node in reversed(self.nodes):
            if node not in ends and any(one not in read or one in kept for one in node.users):
                kept.add(node)
        return self.nodes[0] in kept

    def of(self, wanted: Callable[[Node], bool]) -> Quantization | None:
        """Return it with those ends alone that are wanted, and that a dense tensor of one row
        behind the other can be viewed as; None if none of the results is."""
        *sizes, width = value_of(self.nodes[0]).shape
        shapes = ((*sizes, width), (*sizes, width // BLOCK))
        narrow, scales = (
            [end for end in ends if wanted(end) and _fits(value_of(end), shape)]
            for ends, shape in zip((self.narrow, self.scales), shapes, strict=True)
        )
        return self._replace(narrow=narrow, scales=scales) if narrow else None


class _Rows(NamedTuple):
    """The rows, or `magnitudes` of them, or the `places` of the largest, or the rows, `scaled` by
    their blocks, or these, `narrow`. powers: by powers of two."""

    what: str = ""
    powers: bool = False


class _Blocks(NamedTuple):
    """A number for each block: factor * s ^ power, where s is its scale, amax / 448, or, with
    `powers`, the least power of two that is no smaller."""

    factor: float = 1.0
    power: int = 1
    powers: bool = False


_AMAX, _SCALE, _SCALE_UP = _Blocks(LARGEST), _Blocks(), _Blocks(powers=True)


def read_quantization(rows: Node) -> Quantization | None:
    """Return how a graph quantizes a node, once or, for several products, more often."""
    value = value_of(rows)
    if not isinstance(value, torch.Tensor) or not value.dim() or not is_contiguous(value):
        return None
    width = value.shape[-1]
    if not isinstance(width, int) or width % BLOCK:
        return None
    found: dict[Any, Any] = {rows: _Rows()}
    node, waiting = rows, set(rows.users)
    while waiting:
        node = node.next
        if node in waiting:
            waiting.remove(node)
            meaning = _meaning(node, found)
            if meaning is not None:
                found[node] = meaning
                waiting |= node.users.keys() if _what(meaning) != "narrow" else set()
    narrow = [node for node, meaning in found.items() if _what(meaning) == "narrow"]
    if not narrow:
        return None
    powers = found[narrow[0]].powers
    narrow = [node for node in narrow if found[node].powers == powers]
    scales = [node for node in found if _has_scales(node, found, powers)]
    firsts = [node for node in scales if node.args[0] not in scales]
    return Quantization(narrow, firsts, [*found], powers)


def _what(meaning: Any) -> str:
    return meaning.what if isinstance(meaning, _Rows) else ""


def _fits(value: torch.Tensor, shape: tuple[Any, ...]) -> bool:
    return is_contiguous(value) and (has_shape(value, shape) or sizes_of(value) is not None)


def sizes_of(value: torch.Tensor) -> list[int] | None:
    """Return the sizes of a tensor, -1 for one that tracing does not know; None for several."""
    sizes = [size if isinstance(size, int) else -1 for size in value.shape]
    return sizes if sizes.count(-1) < 2 else None


def _has_scales(node: Node, found: dict[Any, Any], powers: bool) -> bool:
    meaning = found[node]
    if not isinstance(meaning, _Blocks) or meaning.powers != powers or not _is_scale(meaning, 1):
        return False
    return bool(value_of(node).dtype == torch.float32)


def _meaning(node: Node, found: dict[Any, Any]) -> Any:
    """Return what a node computes of the rows; None for anything else."""
    value = value_of(node)
    taken = node.args[0] if node.args else None
    source = found.get(taken) if isinstance(taken, Node) else None
    if kind(node) == "largest and place":
        return _AMAX if _over_blocks(node, source) else None
    if node.target is operator.getitem and kind(taken) == "largest and place":
        return source if node.args[1] == 0 else _Rows("places")
    if not isinstance(value, torch.Tensor):
        return None
    if step := _step(node, found):
        return step
    match kind(node):
        case "cast":
            return _cast(node, source, next(iter(found)))
        case "magnitude" if source == _Rows():
            return _Rows("magnitudes")
        case "magnitude" if isinstance(source, _Blocks):
            return source  # which is not negative
        case "largest" if _over_blocks(node, source):
            return _AMAX
        case "clamped":
            return source if _is_clamp(node, source) else None
        case "reciprocal" | "quotient" | "product" if value.dtype in _WIDE:
            return _result(node, found)
    is_view = kind(node) in _VIEWS or _takes_all(node)
    return source if is_view and source and value.dtype == value_of(taken).dtype else None


def _step(node: Node, found: dict[Any, Any]) -> Any:
    """Return the number of a block that a step to a power of two makes; None for another node."""

    def source(taken: Any) -> Step | None:
        meaning = found.get(taken) if isinstance(taken, Node) else None
        if isinstance(meaning, _Blocks) and _is_scale(meaning, 1) and not meaning.powers:
            return SCALE if value_of(taken).dtype == torch.float32 else None
        return meaning if isinstance(meaning, Step) else None

    made = step_of(node, source)
    return _SCALE_UP if made == POWER_OF_TWO else made


def _takes_all(node: Node) -> bool:
    """Return True for `s[..., None]` and its like."""
    if node.target is not operator.getitem:
        return False
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return all(one in _WHOLE for one in index)


def _cast(node: Node, source: Any, rows: Node) -> Any:
    """Return what a cast is that changes no number, and that of the scaled rows to FP8. The largest
    magnitudes are numbers of the rows' dtype."""
    before = cast_of(node)
    if before is None or source is None:
        return None
    one, two = value_of(before).dtype, value_of(node).dtype
    if two == torch.float8_e4m3fn:
        return source._replace(what="narrow") if _what(source) == "scaled" else None
    if isinstance(source, _Blocks) and one == torch.float64 and two == torch.float32:
        return source
    kept = keeps_numbers(value_of(rows).dtype if source == _AMAX else one, two)
    return source if kept else None


def _over_blocks(node: Node, source: Any) -> bool:
    """Return True for the largest of each 128 columns of the rows' magnitudes."""
    if source != _Rows("magnitudes"):
        return False
    shape: Any = value_of(node.args[0]).shape
    dims = argument(node, 1, "dim")
    dims = [*dims] if isinstance(dims, list | tuple) else [dims]
    return len(shape) > 1 and same_size(shape[-1], BLOCK) and dims in ([-1], [len(shape) - 1])


def _is_clamp(node: Node, source: Any) -> bool:
    """Return True for magnitudes, or scales, that are clamped to more than nothing, and for scaled
    rows that are clamped to what FP8 has."""
    least, most = limits_of(node)
    if any(not isinstance(one, int | float) for one in (least, most) if one is not None):
        return False
    if _what(source) == "scaled":
        return least in (None, -LARGEST) and most in (None, LARGEST)
    if source not in (_AMAX, _SCALE):
        return False
    small = least is None or 0 <= least <= _MOST_FLOOR * (source.factor / LARGEST)
    return small and most in (None, float("inf"))


def _result(node: Node, found: dict[Any, Any]) -> Any:
    """Return what a quotient or a product of two things is, or a reciprocal."""
    one: Any
    if kind(node) == "reciprocal":
        one, other = 1.0, node.args[0]
    elif len(node.args) == 2:
        one, other = node.args
    else:
        return None
    divided = kind(node) != "product"
    left, right = (found.get(each) if isinstance(each, Node) else each for each in (one, other))
    if not divided and isinstance(left, _Blocks):
        left, right, one, other = right, left, other, one
    if any(isinstance(each, int | float) and not 0 < each < inf for each in (left, right)):
        return None
    if isinstance(left, _Blocks) and isinstance(right, int | float):
        return left._replace(factor=left.factor / right)
    if not isinstance(right, _Blocks):
        return None
    inverse = right
    if divided:
        inverse = right._replace(factor=1 / right.factor, power=-right.power)
    if isinstance(left, int | float):
        return inverse._replace(factor=left * inverse.factor)
    if left == _Rows() and _is_scale(inverse, -1) and _are_blocks(one, other):
        return _Rows("scaled", inverse.powers)
    return None


def _are_blocks(rows: Any, numbers: Any) -> bool:
    """Return True if a number stands beside each 128 columns of the rows."""
    one, two = value_of(rows).shape, value_of(numbers).shape
    if len(one) != len(two) or not same_size(one[-1], BLOCK) or not same_size(two[-1], 1):
        return False
    return all(map(same_size, one[:-1], two[:-1]))


def _is_scale(number: _Blocks, power: int) -> bool:
    """Return True for a scale to a power, but for how a constant was rounded to fp32."""
    return number.power == power and isclose(number.factor, 1.0, rel_tol=1e-7)
