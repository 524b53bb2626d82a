"""`patch`: the norms of a model that has a class of its own for them, as Hugging Face's have.

A patched module becomes an instance of a subclass of its class. Weights, names, state dicts, hooks
and `isinstance` stay as they are, also of models on the meta device.
"""

from __future__ import annotations

import copy
import inspect
from functools import cache
from typing import Any

import torch

from .rms_norm import Norm

CASTINGS = ("llama", "gemma", "torch")
_EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
_ORIGINAL = "_normforge_original"


def patch(norm: Norm, model: torch.nn.Module, casting: str | None = None) -> list[str]:
    """Let a package serve the norms of a model; the names of those that it now serves.

    A norm is a module whose class is called …RMSNorm, with one weight of one dimension (or none, if
    it is PyTorch's), an eps, and a forward of one argument. Others are left alone.

    casting: what the norms compute, with xhat = x * rstd in fp32.
      None     found out for each on a few rows; what is neither of the next two is left alone
      "torch"  xhat * w, rounded once to x's dtype
      "gemma"  xhat * (1 + w), rounded once to x's dtype
      "llama"  w * xhat, after xhat was rounded to x's dtype. With None such a norm is served as
               "torch", one rounding less. The product and its gradient are PyTorch's, and slower.

    Raises ValueError for another casting. A model that is patched twice is patched as the last time
    says.
    """
    if casting not in (None, *CASTINGS):
        raise ValueError(f"casting must be one of {', '.join(CASTINGS)} or None, got {casting!r}")
    unpatch(model)
    served = []
    for name, module in model.named_modules():
        if not _may_be_served(module):
            continue
        found = casting or _casting_of(module)
        if found is not None:
            kind: Any = type(module)
            module.__class__ = _patched(kind, norm, found)
            served.append(name)
    return served


def unpatch(model: torch.nn.Module) -> list[str]:
    """Give the norms of a model their own forward back; the names of those that were patched."""
    freed = []
    for name, module in model.named_modules():
        original = getattr(type(module), _ORIGINAL, None)
        if original is not None:
            module.__class__ = original
            freed.append(name)
    return freed


def _may_be_served(module: Any) -> bool:
    kind = type(module)
    if not kind.__name__.endswith("RMSNorm") or hasattr(kind, "_package_norm"):
        return False
    weight = getattr(module, "weight", None)
    if kind is torch.nn.RMSNorm:
        return len(module.normalized_shape) == 1
    alone = list(module.state_dict()) == ["weight"] and weight is not None and weight.dim() == 1
    if not alone or not any(hasattr(module, name) for name in _EPS_NAMES):
        return False
    return len(inspect.signature(module.forward).parameters) == 1


def _eps_of(module: Any) -> float | None:
    found: float | None = next(getattr(module, n) for n in _EPS_NAMES if hasattr(module, n))
    return found


def _casting_of(module: Any) -> str | None:
    """Whether a norm adds 1 to its weight, on rows whose mean is not 0 and the smallest of which
    show the eps; None when it computes anything else."""
    if type(module) is torch.nn.RMSNorm:
        return "torch"
    width, eps = len(module.weight), _eps_of(module)
    weight = torch.linspace(-1, 2, width)
    x = torch.stack([size * torch.linspace(-1, 3, width) for size in (1, 1e-2, 1e-3)])
    alike = copy.copy(module)  # on the CPU, without hooks, whatever device and sharding it has
    alike.__dict__["_parameters"] = {"weight": torch.nn.Parameter(weight)}
    xhat = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + (eps or torch.finfo(x.dtype).eps))
    try:
        with torch.no_grad(), torch.device("cpu"):
            y = type(module).forward(alike, x)
    except Exception:  # it is no such norm
        return None
    for casting, scale in (("torch", weight), ("gemma", 1 + weight)):
        wanted = xhat * scale
        if y.shape == wanted.shape and torch.allclose(y.float(), wanted, rtol=1e-4, atol=1e-5):
            return casting
    return None


@cache
def _patched(kind: type, norm: Norm, casting: str) -> type:
    """A subclass of a class of norms that a package serves."""
    offset = 1.0 if casting == "gemma" else 0.0

    def forward(self: Any, x: torch.Tensor) -> Any:
        return norm.rms_norm(x, self.weight, _eps_of(self), weight_offset=offset)

    def forward_rounded(self: Any, x: torch.Tensor) -> Any:
        return self.weight * norm.rms_norm(x, None, _eps_of(self))

    members = {
        "forward": forward_rounded if casting == "llama" else forward,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        _ORIGINAL: kind,
    }
    return type(kind.__name__, (kind,), members)
