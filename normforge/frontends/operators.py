"""The operators of RMSNorm: what torch.compile, tracers, checkpointing and DTensor see of it.

They are functional: nothing is mutated and no result is an argument. The last argument of each
names the package that serves the call: "" for the one of the tensors' GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch.compiler import is_dynamo_compiling

from ..native.kinds import RMS_NORM, Kinds
from ..serve.call import QuickCall
from ..serve.checks import check_dx_out, check_options
from ..serve.options import Arguments, Backward, FormulaOptions, Options, dw_shape
from ..serve.reference import Results, norm_formula, wide_dtype
from ..torch_internals import is_plain, nothing_like, watched
from .gradients import (
    autograd_of_backward,
    autograd_of_norm,
    autograd_of_norm_and_add,
    wants_gradient,
    without_gradient,
)
from .library import Implementation, Served, decompose, define, differentiate
from .routes import RMS_NORM_ROUTES, Routes
from .unfused import norm_then_add

# DTensor remembers the shardings of an operator by its tensors, and by what stands behind the first
# integer in its schema, which a dtype is: so `dw_dtype` comes before the rest.
_NORM = "(Tensor x, Tensor? weight, float? eps, float weight_offset, str package)"
SCHEMAS = {
    "rms_norm": f"{_NORM} -> (Tensor, Tensor)",
    "add_rms_norm": f"{_NORM.replace('x,', 'x, Tensor residual,')} -> (Tensor, Tensor, Tensor)",
    "rms_norm_and_add": f"{_NORM.replace('x,', 'x, Tensor r,')} -> (Tensor, Tensor)",
    "rms_norm_backward": "(Tensor dy, Tensor x, Tensor rstd, Tensor? weight, Tensor? dresidual,"
    " ScalarType? dw_dtype, float weight_offset, bool need_dx, bool need_dw, str package)"
    " -> (Tensor, Tensor, Tensor)",
    "rms_norm_backward_of_sum": "(Tensor dy, Tensor dy2, Tensor? dy3, Tensor x, Tensor rstd, Tensor"
    " weight, Tensor? dresidual, float weight_offset, str package) -> (Tensor, Tensor, Tensor)",
}


class NormOperators:
    """The server of the calls of a norm's operators that ask for one package.

    package: its name. backward(arguments, options): what serves any backward, quick: what is tried
    before for a plain one; neither may call an operator again.
    """

    layer: ClassVar[str]
    """The name of the layer."""
    aten: ClassVar[tuple[str, ...]]
    """PyTorch's operators of it, forward and backward."""
    routes: ClassVar[Routes]
    """The routes from those to the operators here, in a graph."""
    fused: ClassVar[frozenset[str]] = frozenset()
    """The routed operators that `inductor_backend` leaves to Inductor, which fuses them."""
    served: ClassVar[Served[Any]]
    """The servers of all packages."""
    all: ClassVar[tuple[Any, ...]]
    """The operators."""
    backward_operator: ClassVar[Any]
    """The operator of the backward."""
    kinds: ClassVar[Kinds]
    """The calls that C++ serves."""
    invariant = False
    """True for batch-invariant kernels, whose place no others may take."""

    def __init__(self, package: str, backward: Backward, quick: QuickCall) -> None:
        self.package, self._backward, self._quick = package, backward, quick
        self.retire: Callable[[], None] = lambda: None
        """Called when another package takes the name of this one; native.py sets it."""
        self.served.add(package, self)

    def of_form(self, form: str) -> NormOperators:
        """Return the operators of a norm beside this one whose forward adds in another form. Raises
        LookupError."""
        raise LookupError(form)

    def serve(self, run: Backward, given: Arguments, options: Options) -> Results:
        """Compute any backward: through the operator where somebody watches those, else at once by
        `run`. Who asks its results for a gradient gets an error."""
        wants = given.dx_out is not None and getattr(given.dx_out, "requires_grad", False)
        if wants and torch.is_grad_enabled():
            raise RuntimeError("dx_out requires a gradient, but dx has none: give dx_out.detach()")
        if watched() or not all(map(is_plain, vars(given).values())):
            return self.backward(given, options)
        if wants_gradient(given):
            return without_gradient(run, given, options)
        return run(given, options)

    def backward(self, given: Arguments, options: Options) -> Results:
        """Compute any backward through the operator. `dw_out` and `dx_out` are written by operators
        of PyTorch, which a tracer understands, and so is the formula made of them."""
        if type(options) is FormulaOptions:
            return self._backward(given, options)
        dw_out, dx_out, dw_dtype = given.dw_out, given.dx_out, options.dw_dtype
        check_options(given, options)
        if dx_out is not None:
            check_dx_out(given, options)
        if dw_out is not None:
            narrow = options.accumulate and dw_out.dtype != torch.float64
            dw_dtype = torch.float32 if narrow else dw_out.dtype
        need_dw = options.need_dw and given.weight is not None
        # Compiled code would ask at once for the gradient that is refused.
        with torch.no_grad() if is_dynamo_compiling() else nullcontext():
            dx, dw, third = self.backward_operator(
                given.dy,
                given.x,
                given.rstd,
                given.weight,
                given.dresidual,
                dw_dtype,
                options.weight_offset,
                options.need_dx,
                need_dw,
                *((self.package,) if given.mean is None else (self.package, given.mean)),
            )
        if dw_out is not None:
            with torch.no_grad():
                dw = dw_out.add_(dw) if options.accumulate else dw_out.copy_(dw)
        if dx_out is not None:
            with torch.no_grad():
                dx = dx_out.copy_(dx)
        found = (dx if options.need_dx else None, dw if need_dw else None)
        if given.dresidual is None:
            return found
        return (*found, dx if given.dresidual.dtype == given.x.dtype else third)


def implementation_of_backward(served: Served[Any]) -> Implementation:
    """Return the implementation of the operator of a norm's backward. served: finds what serves a
    package's calls of it."""
    known = served.known  # asked at once, without a call

    def run(
        dy: torch.Tensor,
        x: torch.Tensor,
        rstd: torch.Tensor,
        weight: torch.Tensor | None,
        dresidual: torch.Tensor | None,
        dw_dtype: torch.dtype | None,
        weight_offset: float,
        need_dx: bool,
        need_dw: bool,
        package: str,
        mean: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        operators = known.get(package) or served(package)
        if (
            (need_dx and need_dw and weight is not None)
            and (dresidual is None and dw_dtype is None)
            and weight_offset == 0
        ):
            found = operators._quick(dy, x, rstd, weight, mean)
            if found is not None:
                return (*found, nothing_like(x))
        given = Arguments(dy, x, rstd, weight, dresidual, mean=mean)
        options = Options(weight_offset, need_dx, need_dw, False, dw_dtype)
        dx, dw, *third = operators._backward(given, options)
        other = third[0] if dresidual is not None and dresidual.dtype != x.dtype else None
        # No result may be another one, nor one of another call.
        return tuple(nothing_like(x) if result is None else result for result in (dx, dw, other))

    return run


def fake_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    dresidual: torch.Tensor | None,
    dw_dtype: torch.dtype | None,
    weight_offset: float,
    need_dx: bool,
    need_dw: bool,
    package: str,
    mean: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return results of the shapes and dtypes of a norm's backward, whatever the package."""
    dx, dw, third = (x.new_empty(0) for _ in range(3))
    if need_dx:
        dx = x.new_empty(x.shape)
    if need_dw and weight is not None:
        shape = dw_shape(Arguments(dy, x, rstd, weight, mean=mean))
        dw = weight.new_empty(shape, dtype=dw_dtype or weight.dtype)
    if dresidual is not None and dresidual.dtype != x.dtype:
        third = dresidual.new_empty(x.shape)
    return dx, dw, third


def statistic_like(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor for what a forward saves of every row, such as rstd, of any content."""
    return x.new_empty((*x.shape[:-1], 1), dtype=wide_dtype(x))


class Operators(NormOperators):
    """The server of RMSNorm's operators for one package. forward(x, weight, eps, weight_offset,
    residual) gives (y, rstd[, residual_out]), and may not call an operator either."""

    layer = "RMSNorm"
    aten = ("_fused_rms_norm", "_fused_rms_norm_backward")
    routes = RMS_NORM_ROUTES
    kinds = RMS_NORM
    served: ClassVar[Served[Operators]] = Served()
    rotated = gated = quantized = ""
    """The modules with `rms_norm_rope`, `rms_norm_gated` and `rms_norm_quantized`, into which a
    pass over a graph puts norms; "" for none."""
    rms_norm: ClassVar[Any]
    add_rms_norm: ClassVar[Any]
    rms_norm_and_add: ClassVar[Any]
    rms_norm_backward: ClassVar[Any]
    backward_of_sum: ClassVar[Any]

    def __init__(
        self, package: str, forward: Implementation, backward: Backward, quick: QuickCall
    ) -> None:
        super().__init__(package, backward, quick)
        self._forward = forward
        self.norm_and_add: Implementation = partial(norm_then_add, forward)
        """Serves (x, r, weight, eps, weight_offset) with r + norm(x) and rstd."""
        self.sum_backward: Any = None
        """Serves backwards of sums; None: additions and the backward do."""


# ---- Registered once, when this is imported ------------------------------------------------------

_served, _known = Operators.served, Operators.served.known


def _rms_norm(
    x: Any, weight: Any, eps: Any, offset: float, package: str
) -> tuple[torch.Tensor, ...]:
    operators = _known.get(package) or _served(package)
    return operators._forward(x, weight, eps, offset, None)


def _add_rms_norm(
    x: Any, residual: Any, weight: Any, eps: Any, offset: float, package: str
) -> tuple[torch.Tensor, ...]:
    operators = _known.get(package) or _served(package)
    return operators._forward(x, weight, eps, offset, residual)


def _rms_norm_and_add(*given: Any) -> tuple[torch.Tensor, ...]:
    *of_call, package = given
    operators = _known.get(package) or _served(package)
    return operators.norm_and_add(*of_call)


def _fake_rms_norm(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    return x.new_empty(x.shape), statistic_like(x)


def _fake_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    return x.new_empty(x.shape), statistic_like(x), residual.new_empty(x.shape)


def _define(name: str, run: Implementation, fake: Implementation) -> Any:
    return define(name, SCHEMAS[name], run, fake)


Operators.rms_norm = _define("rms_norm", _rms_norm, _fake_rms_norm)
Operators.add_rms_norm = _define("add_rms_norm", _add_rms_norm, _fake_add_rms_norm)
Operators.rms_norm_and_add = _define("rms_norm_and_add", _rms_norm_and_add, _fake_rms_norm)
_backward = implementation_of_backward(_served)
Operators.rms_norm_backward = Operators.backward_operator = _define(
    "rms_norm_backward", _backward, fake_backward
)
decompose(Operators.rms_norm, lambda *given: norm_formula(*given[:-1]))
decompose(
    Operators.add_rms_norm,
    lambda x, residual, weight, eps, offset, package: norm_formula(
        x, weight, eps, offset, residual
    ),
)
decompose(Operators.rms_norm_and_add, lambda *given: norm_then_add(norm_formula, *given[:-1]))
Operators.all = (
    Operators.rms_norm,
    Operators.add_rms_norm,
    Operators.rms_norm_and_add,
    Operators.rms_norm_backward,
)
for _norm, _run in ((Operators.rms_norm, _rms_norm), (Operators.add_rms_norm, _add_rms_norm)):
    differentiate(_norm, autograd_of_norm(_norm, _run, _served))
differentiate(
    Operators.rms_norm_and_add,
    autograd_of_norm_and_add(Operators.rms_norm_and_add, _rms_norm_and_add, _served),
)
differentiate(
    Operators.rms_norm_backward,
    autograd_of_backward(Operators.rms_norm_backward, _backward),
)
