"""Reads what single nodes of FX graphs compute, in whatever spelling: `x.float()` and
`x.to(torch.float32)`, `a * b`, `a.mul(b)` and `torch.mul(a, b)`."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from .graph_values import value_of

_aten = torch.ops.aten
_SPELLINGS: dict[str, tuple[Any, ...]] = {
    "cast": (
        "to",
        "float",
        "half",
        "bfloat16",
        "type",
        "type_as",
        "int",
        "bool",
        _aten._to_copy.default,
        _aten.to.dtype,
        torch.ops.prims.convert_element_type.default,
    ),
    "square": ("square", torch.square, _aten.square.default),
    "power": ("pow", torch.pow, operator.pow, _aten.pow.Tensor_Scalar),
    "power of two": ("exp2", torch.exp2, _aten.exp2.default),
    "power of a number": (_aten.pow.Scalar,),
    "logarithm": ("log2", torch.log2, _aten.log2.default),
    "ceiling": ("ceil", torch.ceil, _aten.ceil.default),
    "shifted right": (
        operator.rshift,
        torch.bitwise_right_shift,
        _aten.__rshift__.Scalar,
        _aten.bitwise_right_shift.Tensor_Scalar,
    ),
    "shifted left": (
        operator.lshift,
        torch.bitwise_left_shift,
        _aten.__lshift__.Scalar,
        _aten.bitwise_left_shift.Tensor_Scalar,
    ),
    "bits": (_aten.view.dtype,),
    "masked": (operator.and_, torch.bitwise_and, _aten.bitwise_and.Scalar, _aten.__and__.Scalar),
    "mean": ("mean", torch.mean, _aten.mean.dim),
    "sum": ("add", torch.add, operator.add, _aten.add.Tensor, _aten.add.Scalar),
    "root": ("sqrt", torch.sqrt, _aten.sqrt.default),
    "rsqrt": ("rsqrt", torch.rsqrt, _aten.rsqrt.default),
    "product": ("mul", torch.mul, operator.mul, _aten.mul.Tensor),
    "quotient": ("div", torch.div, operator.truediv, _aten.div.Tensor, "true_divide"),
    "reciprocal": ("reciprocal", torch.reciprocal, _aten.reciprocal.default),
    "magnitude": ("abs", torch.abs, operator.abs, _aten.abs.default),
    "largest": ("amax", torch.amax, _aten.amax.default),
    "largest and place": ("max", torch.max, _aten.max.dim),
    "clamped": (
        "clamp",
        torch.clamp,
        "clip",
        torch.clip,
        _aten.clamp.default,
        "clamp_min",
        torch.clamp_min,
        _aten.clamp_min.default,
        "clamp_max",
        torch.clamp_max,
        _aten.clamp_max.default,
    ),
    "negation": ("neg", torch.neg, operator.neg, "negative", torch.negative),
    "sigmoid": ("sigmoid", torch.sigmoid, torch.nn.functional.sigmoid),
    "cosine": ("cos", torch.cos),
    "sine": ("sin", torch.sin),
    "joined": (torch.cat, torch.concat, torch.concatenate),
    "halves": ("chunk", torch.chunk),
    "unsqueezed": ("unsqueeze", torch.unsqueeze, _aten.unsqueeze.default),
    "squeezed": ("squeeze", torch.squeeze, _aten.squeeze.dim, _aten.squeeze.dims),
    "transposed": ("transpose", torch.transpose, "swapaxes", torch.swapaxes),
    "permuted": ("permute", torch.permute, _aten.permute.default),
    "viewed": (
        "view",
        "view_as",
        "reshape",
        torch.reshape,
        "reshape_as",
        "flatten",
        torch.flatten,
        "unflatten",
        torch.unflatten,
        _aten.view.default,
        _aten.reshape.default,
        _aten._unsafe_view.default,
    ),
    "detached": (_aten.detach.default, _aten.alias.default),
    "complex": (torch.view_as_complex, _aten.view_as_complex.default),
    "real": (torch.view_as_real, _aten.view_as_real.default),
    "conjugate": ("conj", torch.conj, _aten._conj.default, _aten._conj_physical.default),
    "copied": ("clone", torch.clone, _aten.clone.default, "resolve_conj", torch.resolve_conj),
}
_KINDS = {spelling: kind for kind, spellings in _SPELLINGS.items() for spelling in spellings}
_WITH_OPTIONS = (
    "cast",
    "mean",
    "joined",
    "halves",
    "unsqueezed",
    "squeezed",
    "transposed",
    "viewed",
    "copied",
    "largest",
    "largest and place",
    "clamped",
)


def kind(node: Any) -> str | None:
    """Return what a call computes, if it has no options that say otherwise."""
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return None
    found = _KINDS.get(node.target)
    return found if found in _WITH_OPTIONS or not node.kwargs else None


def argument(node: Node, place: int, name: str, default: Any = None) -> Any:
    """Return what a call is given at a place, or by a name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def limits_of(clamped: Node) -> tuple[Any, Any]:
    """Return the least and the largest number that a node clamps to; None for what it does not."""
    name = str(getattr(clamped.target, "__name__", clamped.target)).split(".")[0]
    ends = {"clamp_min": ("min",), "clamp_max": ("max",)}.get(name, ("min", "max"))
    limits = {end: argument(clamped, place, end) for place, end in enumerate(ends, 1)}
    return limits.get("min"), limits.get("max")


def only_user(node: Node) -> Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 else None


def cast_of(node: Any) -> Any:
    """Return the node that a node casts, on the same device; None for another node."""
    if kind(node) != "cast" or not node.args or not isinstance(node.args[0], Node):
        return None
    one, two = value_of(node.args[0]), value_of(node)
    if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor):
        return None
    return node.args[0] if one.device == two.device else None


def widened(node: Node) -> Node:
    """Return what a node casts to a dtype that has all its numbers, and another node itself."""
    source: Node | None = cast_of(node)
    if source is None:
        return node
    return source if keeps_numbers(value_of(source).dtype, value_of(node).dtype) else node


def keeps_numbers(before: torch.dtype, behind: torch.dtype) -> bool:
    """Return True if a dtype has all the numbers of another one, which is floating. PyTorch does
    not say so of FP8."""
    if not before.is_floating_point or min(before.itemsize, behind.itemsize) < 2:
        return False
    return torch.promote_types(before, behind) == behind


def other_factor(node: Any, other: Node) -> Any:
    """Return the node that a product multiplies `other` with; None for another node, and for a
    square."""
    if kind(node) != "product" or len(node.args) != 2 or other not in node.args:
        return None
    one, two = node.args
    found = two if one is other else one
    return found if isinstance(found, Node) and found is not other else None


def parts_joined(node: Any) -> list[Node] | None:
    """Return the two tensors of which a node joins the columns."""
    if kind(node) != "joined":
        return None
    parts = node.args[0] if node.args else None
    dim = argument(node, 1, "dim", 0)
    if not isinstance(parts, list | tuple) or len(parts) != 2 or dim not in last_dims(node):
        return None
    return [*parts] if all(isinstance(one, Node) for one in parts) else None


def last_dims(node: Node) -> tuple[int, ...]:
    value = value_of(node)
    return (-1, value.dim() - 1) if isinstance(value, torch.Tensor) else (-1,)
