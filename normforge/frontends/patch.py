"""`patch` serves the norms of a model that has a class of its own for them, as Hugging Face's have,
or PyTorch's.

A patched module becomes an instance of a subclass of its class. Weights, names, state dicts, hooks
and `isinstance` stay as they are, also of models on the meta device.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from ..torch_internals import disable_modes, is_plain
from .rewritten import with_arguments_of
from .rms_norm import Norm
from .tried import (
    UNTRIED,
    eps_of,
    formula_of,
    is_called_so,
    takes_rows_alone,
    what_tells,
    with_its_dtype,
)

CASTINGS = ("llama", "gemma", "torch")
ORIGINAL, _SERVED, _BY = "_normforge_original", "_normforge_served", "_normforge_by"
"""Attributes of a patched class: the class that it was made of, what it serves, and the
ModuleForward that does."""
REMADE = "_normforge_remade"  # attribute of what makes a ModuleForward out of a pickle
_LIBRARY = Path(__file__).parent.parent
ALREADY = "a package serves it already"
_log = logging.getLogger(__name__)

ModuleForward = Callable[..., Any]
"""Takes the module and x."""


def patch(norm: Norm, model: torch.nn.Module, casting: str | None = None) -> list[str]:
    """Let a package serve the norms of a model; the names of those that it now serves.

    A norm is a module whose class is called …Norm (in any case) or derived from torch.nn.RMSNorm,
    with one weight of one dimension (or none, if it is PyTorch's), an eps, and a forward of one
    argument. Each is tried on a few rows on the CPU, and left alone if it computes something else;
    one that cannot be tried there is served only with a casting. The log says why (level INFO), and
    warns if no norm is served. `print(model)` shows which ones are.

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
            return forward_of(norm, "torch") if one else "it normalises several dimensions"
        if hasattr(type(module), "_package_norm"):
            return ALREADY
        if not _looks_like_one(module):
            return "it is not one weight, an eps and a forward of one argument"
        formula = formula_of(module)
        if casting is not None:
            told = "gemma" if casting == "gemma" else "torch"
            if formula not in (told, UNTRIED):
                return f"it computes something else than {casting}"
            return forward_of(norm, casting)
        if formula == UNTRIED:
            return "it raises an error on rows in fp32 on the CPU, in two to four dimensions"
        if formula is None:
            return "it computes something else than xhat * w and xhat * (1 + w)"
        found = with_its_dtype(module, formula)
        return "its results have other dtypes" if found is None else forward_of(norm, found)

    return replace_forwards(model, "RMSNorm", forward_for)


def replace_forwards(
    model: torch.nn.Module,
    norm: str,
    forward_for: Callable[[Any], ModuleForward | str],
    may_be_one: Callable[[Any], bool] | None = None,
    quiet: bool = False,
) -> list[str]:
    """Give modules of a model other forwards; their names. norm: what they are, so that packages of
    two norms patch one model; also the name of PyTorch's class, if it has one. forward_for: the
    same function for modules that are alike, or why one is left alone. may_be_one: whether a module
    is asked about, by default if it is an instance of that class or called a norm. quiet: without a
    warning if no norm is served."""
    _check_module(model)
    _free(model, norm)
    served, left = [], Counter[tuple[type, str]]()
    known: dict[Any, ModuleForward | str] = {}
    for name, module in model.named_modules():
        kind: Any = type(module)
        if not (may_be_one or partial(is_called_so, norm))(module):
            continue
        found: ModuleForward | str = "it has a forward of its own, as a hook of accelerate gives it"
        if "forward" not in vars(module):
            key = what_tells(module)
            if key not in known:
                # Try with real tensors, whatever the model is built under.
                with torch.no_grad(), disable_modes(), torch.device("cpu"):
                    known[key] = forward_for(module)
            found = known[key]
        if isinstance(found, str):
            _log.info("patch leaves %s (%s) alone: %s", name, kind.__name__, found)
            left[kind, found] += 1
        else:
            module.__class__ = _patched(kind, norm, found)
            served.append(name)
    _summarise(norm, len(served), left, quiet)
    return served


def _summarise(norm: str, served: int, left: Counter[tuple[type, str]], quiet: bool) -> None:
    """Say in one line what was served, as a warning if that is nothing at all."""
    count = sum(left.values())
    words = f"patch serves {served} {norm}{'s' * (served != 1)} and leaves {count} alone"
    if left:
        words += ": " + ", ".join(f"{n} {kind.__name__} ({why})" for (kind, why), n in left.items())
    others = {path.stem for path in _LIBRARY.glob("*norm.py")} - {norm.lower()}
    for other in sorted(others):
        names = (kind.__name__ for kind, _ in left if kind.__name__.lower().endswith(other))
        if name := next(names, ""):
            words += f"; normforge.{other}.patch serves {name[-len(other) :]}s over one dimension"
    nothing = not (served or quiet) and all(why != ALREADY for _, why in left)
    _log.log(logging.WARNING if nothing else logging.INFO, "%s", words)


def unpatch(model: torch.nn.Module, norm: str = "RMSNorm") -> list[str]:
    """Give the norms of a model their own forward back; the names of those that were patched. The
    log warns of those whose class was since derived from, as fully_shard and parametrizations do:
    they stay as they are."""
    _check_module(model)
    freed = _free(model, norm)
    for name, module in model.named_modules():
        if is_served(module, norm):
            _log.warning(
                "unpatch leaves %s as it is: %s was made of its patched class. Unpatch a model "
                "before it is sharded or parametrized",
                name,
                type(module).__name__,
            )
    return freed


def is_served(module: torch.nn.Module, norm: str) -> bool:
    """Return True if `replace_forwards` gave a module, or what its class was made of, another
    forward."""
    return getattr(type(module), _SERVED, None) == norm


def served_by(module: Any) -> ModuleForward | None:
    """Return the forward that `replace_forwards` gave a module, if any."""
    found: ModuleForward | None = getattr(type(module), _BY, None)
    return found


def original_forward(module: torch.nn.Module, *given: Any) -> Any:
    """Compute what the forward of such a module computed before."""
    return getattr(type(module), ORIGINAL).forward(module, *given)


def original_class(kind: Any) -> Any:
    """Return the class that a patched one was made of, and another one itself."""
    return getattr(kind, ORIGINAL, kind)


def _check_module(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        got = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"expected one torch.nn.Module, got {got}; call this once for each module")


def _free(model: torch.nn.Module, norm: str) -> list[str]:
    freed = []
    for name, module in model.named_modules():
        kind = type(module)
        # An inherited mark does not count: the class may be made of a patched one.
        if vars(kind).get(_SERVED) == norm:
            module.__class__ = vars(kind)[ORIGINAL]
            freed.append(name)
    return freed


def _looks_like_one(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1:
        return False  # before its state is asked for, which may gather what is sharded
    return list(module.state_dict()) == ["weight"] and takes_rows_alone(module)


@cache
def forward_of(norm: Norm, casting: str) -> ModuleForward:
    """The forward of a module whose norm a package computes. casting: as of `patch` or
    `with_its_dtype`."""
    offset = 1.0 if casting == "gemma" else 0.0

    def of_rows(self: Any, x: torch.Tensor, weight: Any, **how: Any) -> Any:
        turned = _heads_in_memory(self, x)
        if turned is None:
            return norm.rms_norm(x, weight, eps_of(self), **how)
        return norm.rms_norm(turned, weight, eps_of(self), **how).transpose(1, 2)

    def rounded_once(self: Any, x: torch.Tensor) -> Any:
        return of_rows(self, x, self.weight, weight_offset=offset)

    def rounded_twice(self: Any, x: torch.Tensor) -> Any:
        return self.weight * of_rows(self, x, None)

    def widening(self: Any, x: torch.Tensor) -> Any:
        wide = torch.promote_types(x.dtype, self.weight.dtype)
        if wide == x.dtype:
            return rounded_once(self, x)
        if norm._invariant:  # PyTorch's sum of the weight's gradient depends on the batch
            return of_rows(self, x, self.weight, out_dtype=wide)
        return rounded_twice(self, x)

    def as_its_weight(self: Any, x: torch.Tensor) -> Any:
        if x.dtype == self.weight.dtype:
            return rounded_once(self, x)
        return rounded_once(self, x.float()).to(self.weight.dtype)

    others = {"llama": rounded_twice, "widening": widening, "weight's": as_its_weight}
    found = others.get(casting, rounded_once)
    setattr(found, REMADE, partial(forward_of, norm, casting))
    return found


def _heads_in_memory(module: Any, x: Any) -> torch.Tensor | None:
    """Return heads that were transposed in their order in memory; None for other rows. A class's
    own formula keeps this order, and so shall what serves it: a result in another one is copied by
    what works on all heads of a token. PyTorch's class returns contiguous rows."""
    if isinstance(module, torch.nn.RMSNorm) or not isinstance(x, torch.Tensor):
        return None
    if not is_plain(x) or x.dim() != 4 or x.is_contiguous():
        return None
    turned = x.transpose(1, 2)
    return turned if turned.is_contiguous() else None


@cache
def _patched(kind: Any, norm: str, forward: ModuleForward) -> type:
    """A subclass of a class of norms, with another forward, whose arguments have the same names and
    defaults."""
    original = original_class(kind)

    def reduce(self: Any, protocol: Any) -> Any:
        """The class, which no module has, by what it is made of."""
        make, given, *state = kind.__reduce_ex__(self, protocol)
        if given[:1] == (found,):
            make, given = _remake, (kind, norm, getattr(forward, REMADE), make, *given[1:])
        return make, given, *state

    def extra_repr(self: Any) -> str:
        return ", ".join(filter(None, (original.extra_repr(self), "by Normforge")))

    members = {
        "forward": with_arguments_of(original.forward, forward),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "extra_repr": extra_repr,
        "__reduce_ex__": reduce,
        ORIGINAL: kind,
        _SERVED: norm,
        _BY: forward,
    }
    found = type(kind.__name__, (kind,), members)
    return found


def _remake(kind: type, norm: str, forward: Callable[[], Any], make: Any, *given: Any) -> Any:
    """A patched module out of a pickle or of a copy, before it has its state."""
    return make(_patched(kind, norm, forward()), *given)
