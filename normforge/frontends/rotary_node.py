"""The rotary embedding of heads, with autograd: what a package serves, in plain eager code by a
call, elsewhere by an operator. It is linear in its rows, and its backward is the same with the
opposite sign, so that derivatives of any order are kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..operations import ROPE
from ..operations.formula import evaluate
from ..torch_internals import is_batched, is_plain, transforms_active
from .dtensor import is_dtensor
from .gradients import autograd_of
from .library import define, differentiate
from .rope_node import SERVED, flags_of, or_by_formula
from .row_nodes import applied, is_ours, is_seen, like_first


def _run(*given: Any) -> Any:
    *call, package = given
    # The result is contiguous, as `like_first` says, whatever the strides of the rows.
    return SERVED(package).rotate(*call).contiguous()


_SCHEMA = "(Tensor x, Tensor cos, Tensor sin, float sign, str package) -> Tensor"
rope = define("rope", _SCHEMA, _run, like_first)


def formula(x: Any, cos: Any, sin: Any, sign: float, **flags: bool) -> torch.Tensor:
    """Compute y in x's dtype, computed in fp32 (in float64 for float64) and rounded once.
    Differentiable. x: (..., H, N); cos, sin: (..., 1, R / 2); sign: 1, or -1 for the opposite
    angles."""
    given = {"x": x, "cos": cos, "sin": sin, "sign": sign, **flags}
    return evaluate(ROPE, given)["y"].to(x.dtype)


def _rotated(*given: Any) -> torch.Tensor:
    """Return y without gradients, of tensors that `is_ours` has seen."""
    *call, package = given
    y: torch.Tensor
    if is_seen(*call):
        y = rope(*given)
    else:
        y = SERVED(package).rotate(*call)
    return y


class RotaryNode(torch.autograd.Function):
    """A call of `_rotated`."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:
        _, cos, sin, ctx.sign, ctx.package = given
        ctx.save_for_backward(cos, sin)
        return _rotated(*given)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        given = (dy, *ctx.saved_tensors, -ctx.sign)
        turn: Any = rotary_embedding
        if not is_dynamo_compiling() and not transforms_active():
            if is_batched(dy):
                turn = by_formula
            elif not is_plain(dy) and not is_dtensor(dy):
                turn = rope  # of the tensors that AOTAutograd traces
        return turn(*given, ctx.package), None, None, None, None


def rotary_embedding(*given: Any) -> torch.Tensor:
    """Compute `formula` as a package serves it, of its arguments and the package's name; by
    PyTorch's operators where it does not."""
    *call, package = given
    if not is_ours(*call[:3]):
        return formula(*call, **flags_of(package))
    # Autograd of an operator sees changes in place of what it saves; Dynamo's of a node does not.
    if not torch.is_grad_enabled() or is_dynamo_compiling():
        return _rotated(*given)
    y: torch.Tensor = applied(RotaryNode, *given)
    return y


def by_formula(*given: Any) -> Any:
    """Compute a call of the node by PyTorch's operators, of its arguments. Differentiable."""
    return formula(*given[:-1], **flags_of(given[-1]))


_kernel = autograd_of(rope, _run, RotaryNode, by_formula)
differentiate(rope, or_by_formula(_kernel, by_formula, slice(1, 3)))
