"""Checks the arguments of gated RMSNorms' functions: each fault is one sentence."""

from __future__ import annotations

from typing import Any

import torch

from ..operations.gated_rmsnorm_backward import ACTIVATIONS
from ..serve.checks import FLOATS

_OTHER_NAMES = {"swish": "silu"}


def kind_of(activation: Any, norm_before_gate: Any) -> tuple[str, bool]:
    """The activation by the name that operators have, and the order. Raises ValueError for an
    activation that there is not, TypeError for an order that is no bool."""
    found = _OTHER_NAMES.get(activation, activation) if isinstance(activation, str) else ""
    if found not in ACTIVATIONS:
        known = ", ".join((*ACTIVATIONS, *_OTHER_NAMES))
        raise ValueError(f"activation must be one of {known}; got {activation!r}")
    if not isinstance(norm_before_gate, bool):
        raise TypeError(f"norm_before_gate must be True or False, got {norm_before_gate!r}")
    return found, norm_before_gate


def check_sizes(hidden_size: Any, group_size: Any, eps: Any) -> None:
    """Raises TypeError or ValueError for a module that there cannot be."""
    if type(hidden_size) is not int or hidden_size < 1:
        raise ValueError(f"hidden_size must be a whole number of at least 1, got {hidden_size!r}")
    _check_group(f"hidden_size is {hidden_size}", hidden_size, group_size)
    if eps is None:
        raise TypeError("eps must be a number, got None")


def _check_group(what: str, width: int, group_size: Any) -> None:
    if group_size is not None and (
        type(group_size) is not int or group_size < 1 or width % group_size
    ):
        raise ValueError(f"{what}, no multiple of group_size, {group_size!r}")


def check_gated(x: Any, z: Any, weight: Any, eps: Any, group_size: Any) -> None:
    """Raises TypeError or ValueError, in one sentence, for arguments that do not fit together."""
    for name, given in (("x", x), ("z", z), ("weight", weight)):
        if not isinstance(given, torch.Tensor) and not (given is None and name == "weight"):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(given).__name__}")
    if eps is None:
        raise TypeError("eps must be a number, got None")
    if x.dtype not in FLOATS or x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(
            f"x must be floating rows of at least one element, got {x.dtype} of shape "
            f"{tuple(x.shape)}"
        )
    if z.dtype != x.dtype:
        raise TypeError(f"z must have x's dtype {x.dtype}, got {z.dtype}")
    if z.shape != x.shape:
        raise ValueError(f"z must have x's shape {tuple(x.shape)}, got {tuple(z.shape)}")
    width = x.shape[-1]
    _check_group(f"x has {width} columns", width, group_size)
    fits = weight is None or weight.dim() == 1
    if fits and weight is not None:  # `in` does not know symbolic sizes
        fits = weight.shape[0] == width or weight.shape[0] == group_size
    if not fits:
        other = f" or ({group_size},)" if group_size not in (None, width) else ""
        raise ValueError(f"weight must have shape ({width},){other}, got {tuple(weight.shape)}")
    for name, given in (("z", z), ("weight", weight)):
        if given is not None and given.device != x.device:
            raise ValueError(f"{name} is on {given.device} and x on {x.device}")
