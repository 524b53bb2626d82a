"""Finds the modules that compute a gated RMSNorm, by trying them on a few rows on the CPU or by
class."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from itertools import product
from typing import Any

import torch

from ..operations import GATED_BACKWARDS
from ..operations.gated_rmsnorm_backward import gated_rmsnorm
from .gated_checks import kind_of
from .patch import ALREADY
from .tried import (
    EPS_NAMES,
    are_close,
    eps_of,
    evenly,
    in_both_modes,
    is_called_so,
    results_of,
    rows_to_try,
    with_parameters,
)

_GATES = ("gate", "z", "g")
"""Names of the second argument of gated norms."""
_OTHER = "it is not one weight, an eps and a forward of rows and a gate"
_OTHER_FORMULA = (
    "it computes something else than norm(x) * w * act(gate) and norm(x * act(gate)) * w"
)
_GROUPS = ("n_groups", "num_groups", "ngroups")
_KNOWN: dict[str, Callable[[Any], tuple[Any, Any, int | None]]] = {
    "mamba_ssm.ops.triton.layernorm_gated.RMSNorm": lambda module: (
        "silu",
        module.norm_before_gate,
        module.group_size,
    ),
    "fla.modules.fused_norm_gate.FusedRMSNormGated": lambda module: (
        module.activation,
        True,
        None,
    ),
}
"""Norms that run on GPUs alone, by the class whose forward it is: the activation, the order and the
group size. Their results have x's dtype."""
_log = logging.getLogger(__name__)


def is_gated(module: Any) -> bool:
    """Return True if a module may be a gated norm: its class is called so, or its forward takes a
    gate."""
    name = type(module).__name__.lower()
    return "norm" in name and ("gate" in name or _gate_of(module) in _GATES)


def _gate_of(module: Any) -> str:
    """The name of what the forward takes after the rows, if that is one argument."""
    try:
        taken = [*inspect.signature(type(module).forward).parameters.values()]
    except (TypeError, ValueError):  # code that says nothing of what it takes
        return ""
    plain = all(one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for one in taken)
    return taken[2].name if plain and len(taken) == 3 else ""


def forward_that_serves(
    module: Any, forward_of: Callable[[tuple[str, bool], int, bool], Any]
) -> Any:
    """Return the forward that serves a module, or a sentence that says why the module is left
    alone. forward_of: makes it of the activation and the order, the columns of a group, and whether
    the result is as wide as x and the weight together."""
    if hasattr(type(module), "_package"):
        return ALREADY
    weight, known = getattr(module, "weight", None), _known_of(module)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1:
        return _OTHER
    if known is None and not _gate_of(module):
        return _OTHER
    has_eps = any(hasattr(module, name) for name in EPS_NAMES)
    if list(module.state_dict()) != ["weight"] or not has_eps:
        return _OTHER
    if type(eps_of(module)) is not float:
        return _OTHER
    if known is not None:
        activation, norm_before_gate, group_size = known(module)
        kind = kind_of(activation, norm_before_gate)
        return forward_of(kind, group_size or len(weight), False)
    found = _found(module)
    if isinstance(found, str):
        return found
    wide = _is_wide(module)
    return "its results have other dtypes" if wide is None else forward_of(*found, wide)


def log_left(model: torch.nn.Module, why: str) -> None:
    """Say that the gated norms of a model, if any, are left alone, but for those whose names have
    made `patch` of other norms say so."""
    left = sum(is_gated(one) and not is_called_so("RMSNorm", one) for one in model.modules())
    if left:
        _log.info("patch leaves %d gated norm%s alone: %s", left, "s" * (left != 1), why)


def _known_of(module: Any) -> Any:
    """Return the entry of _KNOWN for a module's class, None for others."""
    owner = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    return _KNOWN.get(f"{owner.__module__}.{owner.__qualname__}")


@in_both_modes(_OTHER_FORMULA, serves=lambda found: not isinstance(found, str))
def _found(module: Any) -> tuple[tuple[str, bool], int] | str:
    """Return the formula that a module computes, or why it is no gated norm."""
    width, eps = len(module.weight), float(eps_of(module) or 0.0)
    weight = evenly(-1, 2, width)
    fitting = list(product(GATED_BACKWARDS, _group_sizes(module)))
    for x in rows_to_try(width)[:2]:
        z = evenly(-3, 4, x.numel()).view_as(x)

        def run(x: torch.Tensor, weight: torch.Tensor, z: torch.Tensor) -> Any:
            return with_parameters(module, {"weight": weight})(x, z)

        try:
            found = results_of(run, x, weight, z)
        except Exception:  # it takes other rows, or runs on GPUs alone
            return "it raises an error on rows in fp32 on the CPU"
        for candidate in tuple(fitting):
            kind, group = candidate

            def norm(
                x: torch.Tensor,
                weight: torch.Tensor,
                z: torch.Tensor,
                kind: Any = kind,
                group: int = group,
            ) -> torch.Tensor:
                x, z, weight = (one.unflatten(-1, (-1, group)) for one in (x, z, weight))
                return gated_rmsnorm(x, z, weight, eps, *kind).flatten(-2)

            if not are_close(found, results_of(norm, x, weight, z), x):
                fitting.remove(candidate)
    if fitting:
        return fitting[0]
    return _OTHER_FORMULA


def _group_sizes(module: Any) -> tuple[int, ...]:
    """The columns that a module may normalize together, by the names that such modules have."""
    width = len(module.weight)
    found = [width, getattr(module, "group_size", None)]
    groups = (getattr(module, name, None) for name in _GROUPS)
    found += [width // count for count in groups if type(count) is int and count > 0]
    sizes = (size for size in found if type(size) is int and size > 0 and width % size == 0)
    return tuple(dict.fromkeys(sizes))


def _is_wide(module: Any) -> bool | None:
    """Return True if results are as wide as x and the weight together, False if they are as wide as
    x; None for neither."""
    rows, results = rows_to_try(len(module.weight))[0], {}
    for dtype, other in product((torch.float32, torch.bfloat16), repeat=2):
        weight, x = evenly(-1, 2, len(module.weight)).to(other), rows.to(dtype)
        try:
            results[dtype, other] = with_parameters(module, {"weight": weight})(x, x).dtype
        except Exception:  # it refuses the pair
            continue
    if all(found == dtype for (dtype, _), found in results.items()):
        return False
    alike = all(found == torch.promote_types(*pair) for pair, found in results.items())
    return True if alike else None
