"""Queries and keys of a packed projection, normalized and rotated, with autograd: one node for both
writes their gradients, and that of the values, where they lie in the projection's."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from . import traced_nodes
from .gradients import autograd_of, autograd_of_backward, below_autograd
from .library import define, differentiate
from .rope_node import SERVED, flags_of, formula, gradients_by_formula, or_by_formula
from .row_nodes import applied, is_differentiated, is_ours, is_seen

Packed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""q, k and v."""


def parts_of(qkv: torch.Tensor, of_queries: int, of_keys: int) -> Packed:
    """Return views of the queries, the keys and the values, of shape (..., H, D)."""
    width = qkv.shape[-1] // (of_queries + 2 * of_keys)
    every = qkv.unflatten(-1, (-1, width))
    # Views one by one: those of a split may not be written to.
    values = of_queries + of_keys
    k, v = every.narrow(-2, of_queries, of_keys), every.narrow(-2, values, of_keys)
    return every.narrow(-2, 0, of_queries), k, v


_ARGUMENTS = (
    "Tensor qkv, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor sin, int of_queries,"
    " int of_keys, float eps, float weight_offset, str package"
)


def _run(*given: Any) -> tuple[torch.Tensor, ...]:
    *call, package = given
    # Results are contiguous, as `_fake` says, whatever the strides of the rows.
    q, k = SERVED(package).forward_packed(*call)
    return q.contiguous(), k.contiguous()


def _fake(*given: Any) -> tuple[torch.Tensor, ...]:
    q, k, _ = parts_of(given[0], *given[5:7])
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _run_backward(*given: Any) -> tuple[torch.Tensor, ...]:
    *call, package = given
    dqkv, *dw = SERVED(package).backward_packed(*call)
    return dqkv, *(dqkv.new_empty(0) if one is None else one for one in dw)


def _fake_backward(*given: Any) -> tuple[torch.Tensor, ...]:
    qkv, *weights = given[3:6]
    dw = (qkv.new_empty(0) if one is None else one.new_empty(one.shape) for one in weights)
    return qkv.new_empty(qkv.shape), *dw


qk_norm_rope_forward = define("qk_norm_rope", f"({_ARGUMENTS}) -> (Tensor, Tensor)", _run, _fake)
qk_norm_rope_backward = define(
    "qk_norm_rope_backward",
    f"(Tensor dq, Tensor dk, Tensor dv, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
)


def _by_formula(*given: Any) -> Packed:
    qkv, q_weight, k_weight, cos, sin, *heads, eps, offset, package = given
    q, k, v = parts_of(qkv, *heads)
    rest, flags = (cos, sin, eps, offset), flags_of(package)
    return formula(q, q_weight, *rest, **flags), formula(k, k_weight, *rest, **flags), v


def _gradients_by_formula(*given: Any) -> tuple[Any, ...]:
    dq, dk, dv, qkv, q_weight, k_weight, cos, sin, *heads, eps, offset, package = given
    q, k, _ = parts_of(qkv, *heads)
    rest, flags = (cos, sin, eps, offset), flags_of(package)
    to_q, of_q = gradients_by_formula(dq, q, q_weight, *rest, **flags)
    to_k, of_k = gradients_by_formula(dk, k, k_weight, *rest, **flags)
    # Batched gradients have no rule for flatten().
    return torch.cat((to_q, to_k, dv), -2).reshape(qkv.shape), of_q, of_k


def _forward(*given: Any) -> Packed:
    """Return q, k and v without gradients, of tensors that `is_ours` has seen."""
    *call, package = given
    if is_seen(*call):
        q, k = qk_norm_rope_forward(*given)
    else:
        q, k = SERVED(package).forward_packed(*call)
    return q, k, parts_of(call[0], *call[5:7])[2]


class PackedNode(torch.autograd.Function):
    """A call of `_forward`. by_formula: such a call by PyTorch's operators."""

    by_formula = staticmethod(_by_formula)

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Packed:
        ctx.save_for_backward(*given[:5])
        ctx.rest = given[5:]
        return _forward(*given)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        given = (*grads, *ctx.saved_tensors, *ctx.rest)
        if is_differentiated(*grads):
            dqkv, *dw = _gradients_by_formula(*given)
        elif is_seen(*grads):
            dqkv, *dw = qk_norm_rope_backward(*given)
        else:
            dqkv, *dw = SERVED(given[-1]).backward_packed(*given[:-1])
        of_q, of_k = (one if ctx.needs_input_grad[i] else None for i, one in enumerate(dw, 1))
        return dqkv, of_q, of_k, *(None,) * 7


class OperatorPacked(torch.autograd.Function):
    """A call of the operator of the forward, which does not return the values."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        ctx.save_for_backward(*given[:5])
        ctx.rest = given[5:]
        return below_autograd(qk_norm_rope_forward, given)

    @staticmethod
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> Any:
        return PackedNode.backward(ctx, dq, dk, torch.zeros_like(dk))


def _of_operator(*given: Any) -> tuple[torch.Tensor, ...]:
    return _by_formula(*given)[:2]


_kernel = autograd_of(qk_norm_rope_forward, _run, OperatorPacked, _of_operator)
differentiate(qk_norm_rope_forward, or_by_formula(_kernel, _of_operator, slice(3, 5)))
differentiate(qk_norm_rope_backward, autograd_of_backward(qk_norm_rope_backward, _run_backward))


def packed_norms(*given: Any) -> Packed:
    """Return q, k and v as a package serves them, of a projection, the weights of queries and of
    keys, cos and sin of shape (..., 1, R / 2), the numbers of heads, eps, what is added to the
    weights, and the package's name; by PyTorch's operators where it does not."""
    if not is_ours(*given[:5]):
        return _by_formula(*given)
    if not torch.is_grad_enabled():
        return _forward(*given)
    found: Packed = (
        traced_nodes.packed(*given) if is_dynamo_compiling() else applied(PackedNode, *given)
    )
    return found
