"""The common part of the autograd nodes of operations over rows."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_dynamo_compiling

from ..torch_internals import (
    has_tangent,
    is_batched,
    is_plain,
    tracing,
    transforms_active,
    watched,
    without_inference,
)


def like_first(*given: Any) -> Any:
    """Return what an operator's result looks like that is contiguous rows like the first argument,
    whatever the strides of these."""
    return given[0].new_empty(given[0].shape)


def is_ours(*given: Any) -> bool:
    """Return True if a node may take these tensors. Transforms, forward mode, tracers and
    subclasses of tensors know PyTorch's operators alone; modes and fake tensors know ours, too."""
    if transforms_active():
        return False
    if is_dynamo_compiling():  # it cannot trace the other questions
        return all(map(is_plain, given))
    if tracing() is not None:
        return False
    plain = all(is_plain(one) or isinstance(one, FakeTensor) for one in given)
    return plain and not has_tangent(*given)


def is_seen(*given: Any) -> bool:
    """Return True if somebody sees the operators of a call of these tensors: a compiler, a mode, or
    a subclass of tensors."""
    return watched() or not all(map(is_plain, given))


def is_differentiated(*grads: Any) -> bool:
    """Return True if a node's backward, of these gradients, has to be PyTorch's operators: it is
    differentiated itself, transformed or batched."""
    return not is_dynamo_compiling() and (
        torch.is_grad_enabled()
        or transforms_active()
        or any(is_batched(dy) for dy in grads if dy is not None)
    )


def applied(node: type[torch.autograd.Function], *given: Any) -> Any:
    """Apply a node, to copies of tensors that were made in inference mode."""
    try:
        return node.apply(*given)
    except RuntimeError as error:
        return node.apply(*without_inference(error, *given))
