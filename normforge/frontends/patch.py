"""`patch`: the norms of a model that has a class of its own for them, as Hugging Face's have, or
PyTorch's.

A patched module becomes an instance of a subclass of its class. Weights, names, state dicts, hooks
and `isinstance` stay as they are, also of models on the meta device.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ..torch_internals import disable_modes
from .rms_norm import Norm

CASTINGS = ("llama", "gemma", "torch")
_EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
_ORIGINAL, _SERVED = "_normforge_original", "_normforge_served"
_UNTRIED = "untried"
_log = logging.getLogger(__name__)

ModuleForward = Callable[..., Any]
"""Takes the module and x."""


def patch(norm: Norm, model: torch.nn.Module, casting: str | None = None) -> list[str]:
    """Let a package serve the norms of a model; the names of those that it now serves.

    A norm is a module whose class is called …Norm (in any case) or derived from torch.nn.RMSNorm,
    with one weight of one dimension (or none, if it is PyTorch's), an eps, and a forward of one
    argument. Each is tried on a few rows on the CPU, and left alone if it computes something else;
    one that cannot be tried there is served only with a casting. The log says why (level INFO).

    casting: what the norms compute, with xhat = x * rstd in fp32.
      None     the next or the one after it, whichever a norm turns out to compute
      "torch"  xhat * w, rounded once to x's dtype
      "gemma"  xhat * (1 + w), rounded once to x's dtype
      "llama"  w * xhat, after xhat was rounded to x's dtype. With None such a norm is served as
               "torch", one rounding less, unless its weight is wider than x: then its result is as
               wide as the weight, and it is served as "llama". The product and its gradient are
               PyTorch's, and slower. Batch-invariant norms widen x instead.

    A torch.nn.RMSNorm is served as it is, whatever the casting.

    Raises ValueError for another casting. A model that is patched twice is patched as the last time
    says.
    """
    if casting not in (None, *CASTINGS):
        raise ValueError(f"casting must be one of {', '.join(CASTINGS)} or None, got {casting!r}")

    def forward_for(module: Any) -> ModuleForward | str:
        if type(module) is torch.nn.RMSNorm:
            one = len(module.normalized_shape) == 1
            return _forward_of(norm, "torch") if one else "it normalises several dimensions"
        if hasattr(type(module), "_package_norm"):
            return "a package serves it already"
        if not _looks_like_one(module):
            return "it is not one weight, an eps and a forward of one argument"
        formula = _formula_of(module)
        if casting is not None:
            told = "gemma" if casting == "gemma" else "torch"
            if formula not in (told, _UNTRIED):
                return f"it computes something else than {casting}"
            return _forward_of(norm, casting)
        if formula == _UNTRIED:
            return "it raises an error on rows in fp32 on the CPU"
        if formula is None:
            return "it computes something else than xhat * w and xhat * (1 + w)"
        found = _with_its_dtype(module, formula)
        return "its results have other dtypes" if found is None else _forward_of(norm, found)

    return replace_forwards(model, "RMSNorm", forward_for)


def replace_forwards(
    model: torch.nn.Module, norm: str, forward_for: Callable[[Any], ModuleForward | str]
) -> list[str]:
    """Give modules of a model other forwards; their names. norm: what they are, so that packages of
    two norms patch one model; also the name of PyTorch's class. forward_for: the same function for
    modules that are alike, or why one is left alone."""
    _check_module(model)
    _free(model, norm)
    served = []
    for name, module in model.named_modules():
        kind: Any = type(module)
        named_so = kind.__name__.lower().endswith("norm")
        if not named_so and not isinstance(module, getattr(torch.nn, norm)):
            continue
        found: ModuleForward | str = "it has a forward of its own, as a hook of accelerate gives it"
        if "forward" not in vars(module):
            # With real tensors, whatever the model is built under.
            with torch.no_grad(), disable_modes(), torch.device("cpu"):
                found = forward_for(module)
        if isinstance(found, str):
            _log.info("patch leaves %s (%s) alone: %s", name, kind.__name__, found)
        else:
            module.__class__ = _patched(kind, norm, found)
            served.append(name)
    return served


def unpatch(model: torch.nn.Module, norm: str = "RMSNorm") -> list[str]:
    """Give the norms of a model their own forward back; the names of those that were patched. The
    log warns of those whose class was since derived from, as fully_shard and parametrizations do:
    they stay as they are."""
    _check_module(model)
    freed = _free(model, norm)
    for name, module in model.named_modules():
        if getattr(type(module), _SERVED, None) == norm:
            _log.warning(
                "unpatch leaves %s as it is: %s was made of its patched class. Unpatch a model "
                "before it is sharded or parametrized",
                name,
                type(module).__name__,
            )
    return freed


def _check_module(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        got = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"expected one torch.nn.Module, got {got}; call this once for each module")


def _free(model: torch.nn.Module, norm: str) -> list[str]:
    freed = []
    for name, module in model.named_modules():
        kind = type(module)
        # Not what is inherited: the class may be another one's, made of a patched one.
        if vars(kind).get(_SERVED) == norm:
            module.__class__ = vars(kind)[_ORIGINAL]
            freed.append(name)
    return freed


def _looks_like_one(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1:
        return False  # before its state is asked for, which may gather what is sharded
    if list(module.state_dict()) != ["weight"]:
        return False
    if not any(hasattr(module, name) for name in _EPS_NAMES):
        return False
    return len(inspect.signature(module.forward).parameters) == 1


def _eps_of(module: Any) -> float | None:
    found: float | None = next(getattr(module, n) for n in _EPS_NAMES if hasattr(module, n))
    return found


def _formula_of(module: Any) -> str | None:
    """Whether a norm adds 1 to its weight ("gemma") or not ("torch"), on rows whose mean is not 0
    and the smallest of which show the eps; None when it computes anything else."""
    width, eps = len(module.weight), _eps_of(module)
    weight, x = evenly(-1, 2, width), rows_to_try(width)
    y = try_forward(module, {"weight": weight}, x)
    if y is None:
        return _UNTRIED
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    xhat = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    for formula, scale in (("torch", weight), ("gemma", 1 + weight)):
        if is_close(y, xhat * scale):
            return formula
    return None


def _with_its_dtype(module: Any, formula: str) -> str | None:
    """How a norm with this formula is served so that its results keep their dtype: as it is where
    that is x's; as "widening" where "torch" gives what x and the weight promote to; else None."""
    x = rows_to_try(len(module.weight)).bfloat16()
    weights = [evenly(-1, 2, x.shape[-1]).to(dtype) for dtype in (torch.float32, x.dtype)]
    tried = [try_forward(module, {"weight": weight}, x) for weight in weights]
    found = [y.dtype for y in tried if isinstance(y, torch.Tensor)]
    if all(dtype == x.dtype for dtype in found):
        return formula
    widens = formula == "torch" and found == [weight.dtype for weight in weights]
    return "widening" if widens else None


def evenly(first: float, last: float, width: int) -> torch.Tensor:
    return torch.linspace(first, last, width, dtype=torch.float32)


def rows_to_try(width: int) -> torch.Tensor:
    """Rows whose mean is not 0, of different sizes."""
    return torch.stack([size * evenly(-1, 3, width) for size in (1, 1e-2, 1e-3)])


def try_forward(module: Any, parameters: dict[str, torch.Tensor | None], x: torch.Tensor) -> Any:
    """What a module with these parameters makes of x; None when it cannot."""
    # Without hooks and parameters, and without a call of __new__: that of FSDP makes a new module.
    alike = object.__new__(type(module))
    alike.__dict__ |= vars(module)
    alike.__dict__["_parameters"] = {
        name: None if value is None else torch.nn.Parameter(value)
        for name, value in parameters.items()
    }
    try:
        return type(module).forward(alike, x)
    except Exception:  # it is no such norm
        return None


def is_close(y: Any, wanted: torch.Tensor) -> bool:
    """Whether what `try_forward` gave is what was wanted, up to rounding."""
    same = isinstance(y, torch.Tensor) and y.shape == wanted.shape
    return same and torch.allclose(y.float(), wanted, rtol=1e-4, atol=1e-5)


@cache
def _forward_of(norm: Norm, casting: str) -> ModuleForward:
    """The forward of a module whose norm a package computes."""
    offset = 1.0 if casting == "gemma" else 0.0

    def rounded_once(self: Any, x: torch.Tensor) -> Any:
        return norm.rms_norm(x, self.weight, _eps_of(self), weight_offset=offset)

    def rounded_twice(self: Any, x: torch.Tensor) -> Any:
        return self.weight * norm.rms_norm(x, None, _eps_of(self))

    def widening(self: Any, x: torch.Tensor) -> Any:
        wide = torch.promote_types(x.dtype, self.weight.dtype)
        if wide == x.dtype:
            return rounded_once(self, x)
        if norm._invariant:  # PyTorch's sum of the weight's gradient depends on the batch
            return norm.rms_norm(x, self.weight, _eps_of(self), out_dtype=wide)
        return rounded_twice(self, x)

    return {"llama": rounded_twice, "widening": widening}.get(casting, rounded_once)


@cache
def _patched(kind: type, norm: str, forward: ModuleForward) -> type:
    """A subclass of a class of norms, with another forward, whose argument has the same name."""
    original: Any = getattr(kind, _ORIGINAL, kind)
    _, name = inspect.signature(original.forward).parameters
    scope: dict[str, Any] = {"served": forward}
    exec(f"def forward(self, {name}):\n    return served(self, {name})", scope)
    members = {
        "forward": scope["forward"],
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        _ORIGINAL: kind,
        _SERVED: norm,
    }
    return type(kind.__name__, (kind,), members)
