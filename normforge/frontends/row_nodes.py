"""The common part of the autograd nodes of operations over rows."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_dynamo_compiling

from ..torch_internals import (
    has_tangent,
    is_plain,
    tracing,
    transforms_active,
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


def applied(node: type[torch.autograd.Function], *given: Any) -> Any:
    """Apply a node, to copies of tensors that were made in inference mode."""
    try:
        return node.apply(*given)
    except RuntimeError as error:
        return node.apply(*without_inference(error, *given))
