"""Finds out what a module computes, by trying a few rows on the CPU: results, gradients and
dtypes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from itertools import product
from typing import Any, TypeVar, cast

import torch

from ..torch_internals import hooks_for_all

Parameters = Mapping[str, torch.Tensor | None]
Results = list[torch.Tensor | None]

_OF_ALL_MODULES = frozenset(vars(torch.nn.Module()))
_PLAIN = (bool, int, float, str, torch.Size, torch.dtype, type(None))
EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
UNTRIED = "untried"
"""A value in the place of a formula: the module computes nothing on the CPU."""


def is_called_so(norm: str, module: Any) -> bool:
    """Return True if a module is of PyTorch's class of this name, or its class is called a norm."""
    return type(module).__name__.lower().endswith("norm") or isinstance(
        module, getattr(torch.nn, norm)
    )


def eps_of(module: Any) -> float | None:
    """Raises AttributeError for a module without one."""
    name = next((name for name in EPS_NAMES if hasattr(module, name)), EPS_NAMES[0])
    found: float | None = getattr(module, name)
    return found


def takes_rows_alone(module: Any) -> bool:
    """Return True if the forward of a module has one argument, and it has an eps that is no tensor:
    one may change, and has a number on the CPU."""
    if not any(hasattr(module, name) for name in EPS_NAMES):
        return False
    if isinstance(eps_of(module), torch.Tensor):
        return False
    return len(inspect.signature(module.forward).parameters) == 1


def is_hooked(module: Any) -> bool:
    """Return True if a call of a module does more than its class's forward: `has_hooks`, or it has
    a forward of its own."""
    return "forward" in vars(module) or has_hooks(module)


def has_hooks(module: Any) -> bool:
    """Return True if a call of a module runs hooks: its own, or those for all modules."""
    of_forward = module._forward_pre_hooks or module._forward_hooks
    of_backward = module._backward_pre_hooks or module._backward_hooks
    return bool(of_forward or of_backward or hooks_for_all())


def what_tells(module: torch.nn.Module) -> Any:
    """A key that modules share which compute the same of the same parameters: the class, the shapes
    and what is plain among the attributes. A module that keeps anything else has its own key."""
    kept = {name: value for name, value in vars(module).items() if name not in _OF_ALL_MODULES}
    plain = all(
        isinstance(value, _PLAIN) or (type(value) is tuple and all(type(v) is int for v in value))
        for value in kept.values()
    )
    if not plain or module._buffers or module._modules:
        return id(module)
    shapes = [(name, None if p is None else p.shape) for name, p in module._parameters.items()]
    return type(module), module.training, *kept.items(), *shapes


def evenly(first: float, last: float, width: int) -> torch.Tensor:
    return torch.linspace(first, last, width, dtype=torch.float32)


def rows_to_try(width: int) -> list[torch.Tensor]:
    """Rows in fp32 whose mean is not 0, of sizes that show an eps and a clamp, in two, three and
    four dimensions, none of which is like another."""
    rows = torch.stack([size * evenly(-1, 3, width) for size in (1, 1e-2, 1e-3, 30, 1e4, 7)])
    return [rows[:3], rows.view(2, 3, width), rows.view(1, 3, 2, width)]


def alike(
    module: Any, parameters: Parameters, modules: Mapping[str, torch.nn.Module] | None = None
) -> Any:
    """A module that has these parameters, and these modules in the place of its own."""
    # It calls no __new__: FSDP's makes a new module.
    made = object.__new__(type(module))
    made.__dict__ |= vars(module)
    made.__dict__["_parameters"] = dict(parameters)
    if modules is not None:
        made.__dict__["_modules"] = dict(modules)
    return made


def in_other_mode(module: Any) -> Any:
    """Return a module like this one that trains, if this one does not, or the other way round."""
    children: dict[str, Any] = {
        name: None if child is None else in_other_mode(child)
        for name, child in module._modules.items()
    }
    made = alike(module, module._parameters, children)
    made.__dict__["training"] = not module.training
    return made


Answer = TypeVar("Answer", bound=Callable[[Any], Any])


def in_both_modes(
    otherwise: Any, serves: Callable[[Any], bool] = bool
) -> Callable[[Answer], Answer]:
    """Decorate a function that says what a module computes: it answers `otherwise` for one that
    computes something else while it trains, as a dropout does, and UNTRIED for one that runs in
    one of the modes alone. serves: whether an answer lets a module be served."""

    def decorated(answer: Answer) -> Answer:
        @wraps(answer)
        def in_both(module: Any) -> Any:
            found = answer(module)
            if not serves(found) or (other := answer(in_other_mode(module))) == found:
                return found
            return UNTRIED if serves(other) and UNTRIED in (found, other) else otherwise

        return cast(Answer, in_both)

    return decorated


def with_parameters(module: Any, parameters: Parameters) -> Callable[..., Any]:
    """The forward of a module that had these parameters, without its hooks."""
    other = alike(module, parameters)
    return lambda *given: type(module).forward(other, *given)


def dtypes_of_results(
    module: Any, parameters: Parameters, width: int
) -> dict[tuple[torch.dtype, torch.dtype], torch.dtype]:
    """The dtypes of what a module computes, by those of x and of its parameters; without the pairs
    that it refuses."""
    rows, given = rows_to_try(width)[0], {}
    for dtype, other in product((torch.float32, torch.bfloat16, torch.float16), repeat=2):
        scales = {k: None if v is None else v.to(other) for k, v in parameters.items()}
        try:
            given[dtype, other] = with_parameters(module, scales)(rows.to(dtype)).dtype
        except Exception:  # it refuses the pair
            continue
    return given


def try_training(module: Any, parameters: Parameters, x: torch.Tensor) -> Results | None:
    """`results_of` a module with these parameters; None when it refuses the rows."""
    scales = {name: value for name, value in parameters.items() if value is not None}

    def forward(x: torch.Tensor, *values: torch.Tensor) -> Any:
        return with_parameters(module, {**parameters, **dict(zip(scales, values, strict=True))})(x)

    try:
        return results_of(forward, x, *scales.values())
    except Exception:  # it is no such norm
        return None


def results_of(norm: Callable[..., Any], x: torch.Tensor, *scales: torch.Tensor) -> Results:
    """Return y, and the gradients of x and the scales for a dy that is not the same everywhere;
    None for each that does not take part. y alone where there is no backward, as in norms for
    inference, and nothing where it is no tensor."""
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [given.clone().requires_grad_() for given in (x, *scales)]
        y = norm(leaves[0] * 1, *leaves[1:])  # no leaf, because some norms write to it
        if not isinstance(y, torch.Tensor):
            return []
        dy = evenly(-1, 1, y.numel()).view_as(y).to(y.dtype)
        try:
            return [y.detach(), *torch.autograd.grad(y, leaves, dy, allow_unused=True)]
        except RuntimeError:
            return [y.detach()]


def are_close(found: Results | None, wanted: Results, x: torch.Tensor) -> bool:
    """Return True if y and the gradients, if any, are what was wanted, up to rounding, for these
    rows."""
    if found is None or len(found) not in (1, len(wanted)):
        return False
    for index, (one, other) in enumerate(zip(found, wanted, strict=False)):
        if one is None or other is None or one.shape != other.shape:
            return False
        if one.dtype != other.dtype:
            return False
        # The gradient of a large row is small.
        size = x.abs().amax(-1, keepdim=True) if index == 1 else 1.0
        if not torch.allclose(one * size, other * size, rtol=1e-4, atol=1e-5):
            return False
    return True


@in_both_modes(otherwise=None)
def formula_of(module: Any) -> str | None:
    """Return "gemma" if a norm adds 1 to its weight, "torch" if not, by its results and its
    gradients; None when it computes anything else."""
    width, eps = len(module.weight), eps_of(module)
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    scales = {"weight": evenly(-1, 2, width)}
    fitting, untried = ["torch", "gemma"], False
    for x in rows_to_try(width):
        found = try_training(module, scales, x)
        untried |= found is None  # it may take four dimensions for an image's
        for formula in list(fitting if found is not None else ()):
            offset = float(formula == "gemma")

            def norm(x: torch.Tensor, weight: torch.Tensor, offset: float = offset) -> torch.Tensor:
                rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
                return x * rstd * (weight + offset)

            if not are_close(found, results_of(norm, x, *scales.values()), x):
                fitting.remove(formula)
    if untried and fitting:
        return UNTRIED
    return fitting[0] if fitting and _is_unbounded(module, fitting[0], eps) else None


def _is_unbounded(module: Any, formula: str, eps: float) -> bool:
    """Return True if a norm with this formula does not clamp large results."""
    x, weight = rows_to_try(len(module.weight))[0], evenly(-1e3, 2e3, len(module.weight))
    found = try_training(module, {"weight": weight}, x)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight + (formula == "gemma"))
    return found is not None and are_close(found[:1], [y], x)


def with_its_dtype(module: Any, formula: str) -> str | None:
    """Return how a norm with this formula is served so that its results keep their dtype: as it is
    where that is x's; as "widening" where "torch" gives what x and the weight promote to, as
    "weight's" where it gives the weight's; else None."""
    width = len(module.weight)
    given = dtypes_of_results(module, {"weight": evenly(-1, 2, width)}, width)
    for served in (formula, *(("widening", "weight's") if formula == "torch" else ())):
        if all(dtype == dtype_by(served, *pair) for pair, dtype in given.items()):
            return served
    return None


def dtype_by(served: str, x: torch.dtype, weight: torch.dtype) -> torch.dtype:
    """Return the dtype of the results of a norm that is served so, as of `with_its_dtype`."""
    if served == "weight's":
        return weight
    return torch.promote_types(x, weight) if served == "widening" else x


@in_both_modes(otherwise=False)
def is_layer_norm(module: Any) -> bool:
    """Return True if a module computes what torch.nn.LayerNorm does, over one dimension."""
    weight = getattr(module, "weight", None)
    shape: Any = weight.shape if isinstance(weight, torch.Tensor) else ()
    if isinstance(module, torch.nn.LayerNorm):
        shape = module.normalized_shape
    if len(shape) != 1 or not takes_rows_alone(module):
        return False
    eps = eps_of(module)
    if eps is None:
        return False
    if type(module) is torch.nn.LayerNorm:
        return True
    if not {*module.state_dict()} <= {"weight", "bias"}:
        return False
    (width,) = shape
    values = {"weight": evenly(-1, 2, width), "bias": evenly(2, -3, width)}
    have = [name for name in values if getattr(module, name, None) is not None]
    scales = {name: values[name] if name in have else None for name in values}
    own = {k: v for k, v in scales.items() if v is not None or hasattr(module, k)}
    given = [value for value in scales.values() if value is not None]

    def norm(x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        leaves = iter(given)
        weight, bias = (None if value is None else next(leaves) for value in scales.values())
        return torch.nn.functional.layer_norm(x, (width,), weight, bias, eps)

    # Some take four dimensions for channels before rows, and some compute narrow rows in fp32.
    for x in rows_to_try(width):
        if not are_close(try_training(module, own, x), results_of(norm, x, *given), x):
            return False
    return all(dtype == x for (x, _), dtype in dtypes_of_results(module, own, width).items())
