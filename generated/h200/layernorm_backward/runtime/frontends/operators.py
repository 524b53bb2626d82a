"""The operators of a package: what torch.compile, tracers, checkpointing and DTensor see of it.

They are functional: nothing is mutated and no result is an argument. Their namespace has the
package's digest in its name, so a graph that was compiled with one package, and every cache of it,
is never taken for that of another.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch.compiler import is_dynamo_compiling

from ..serve.options import Arguments, Options
from ..serve.reference import Results
from .gradients import autograd_of_add_norm, autograd_of_backward, autograd_of_norm

# DTensor remembers the shardings of an operator by its tensors, and by what stands behind the first
# integer in its schema, which a dtype is: so `dw_dtype` comes before the rest.
SCHEMAS = {
    "rms_norm": "(Tensor x, Tensor? weight, float? eps, float weight_offset) -> (Tensor, Tensor)",
    "add_rms_norm": "(Tensor x, Tensor residual, Tensor? weight, float? eps, float weight_offset)"
    " -> (Tensor, Tensor, Tensor)",
    "rms_norm_backward": "(Tensor dy, Tensor x, Tensor rstd, Tensor? weight, Tensor? dresidual,"
    " ScalarType? dw_dtype, float weight_offset, bool need_dx, bool need_dw)"
    " -> (Tensor, Tensor, Tensor)",
}


class Operators:
    """The operators of one package, registered when this is constructed and for the life of the
    process.

    forward(x, weight, eps, weight_offset, residual) gives (y, rstd[, residual_out]);
    backward(arguments, options) is `rmsnorm_backward`; neither may call an operator again.
    """

    def __init__(
        self,
        digest: str,
        forward: Callable[..., tuple[torch.Tensor, ...]],
        backward: Callable[[Arguments, Options], Results],
    ) -> None:
        self._forward, self._backward = forward, backward
        self._library, self.namespace = _own_library(f"normforge_{digest}")
        for name, schema in SCHEMAS.items():
            self._library.define(name + schema)
            for device in ("CPU", "CUDA"):
                self._library.impl(name, getattr(self, f"_{name}"), device)
            torch.library.register_fake(
                f"{self.namespace}::{name}", globals()[f"_fake_{name}"], lib=self._library
            )
        namespace = getattr(torch.ops, self.namespace)
        self.rms_norm = namespace.rms_norm.default
        self.add_rms_norm = namespace.add_rms_norm.default
        self.rms_norm_backward = namespace.rms_norm_backward.default
        for name, kernel in (
            ("rms_norm", autograd_of_norm(self.rms_norm, self.backward)),
            ("add_rms_norm", autograd_of_add_norm(self.add_rms_norm, self.backward)),
            ("rms_norm_backward", autograd_of_backward(self.rms_norm_backward)),
        ):
            self._library.impl(name, kernel, "Autograd")

    def backward(self, given: Arguments, options: Options) -> Results:
        """`rmsnorm_backward` through the operator. `dw_out` is written by operators of PyTorch,
        which a tracer understands."""
        dw_out, dw_dtype = given.dw_out, options.dw_dtype
        if dw_out is not None:
            narrow = options.accumulate and dw_out.dtype != torch.float64
            dw_dtype = torch.float32 if narrow else dw_out.dtype
        need_dw = options.need_dw and given.weight is not None
        # What is compiled would ask at once for the gradient that is refused.
        with torch.no_grad() if is_dynamo_compiling() else nullcontext():
            dx, dw, third = self.rms_norm_backward(
                *(given.dy, given.x, given.rstd, given.weight, given.dresidual),
                *(dw_dtype, options.weight_offset, options.need_dx, need_dw),
            )
        if dw_out is not None:
            with torch.no_grad():
                dw = dw_out.add_(dw) if options.accumulate else dw_out.copy_(dw)
        found = (dx if options.need_dx else None, dw if need_dw else None)
        if given.dresidual is None:
            return found
        return (*found, dx if given.dresidual.dtype == given.x.dtype else third)

    # ---- What runs ---------------------------------------------------------------------------

    def _rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor | None, eps: float | None, weight_offset: float
    ) -> tuple[torch.Tensor, ...]:
        return self._forward(x, weight, eps, weight_offset, None)

    def _add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float | None,
        weight_offset: float,
    ) -> tuple[torch.Tensor, ...]:
        return self._forward(x, weight, eps, weight_offset, residual)

    def _rms_norm_backward(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        rstd: torch.Tensor,
        weight: torch.Tensor | None,
        dresidual: torch.Tensor | None,
        dw_dtype: torch.dtype | None,
        weight_offset: float,
        need_dx: bool,
        need_dw: bool,
    ) -> tuple[torch.Tensor, ...]:
        given = Arguments(dy, x, rstd, weight, dresidual)
        options = Options(weight_offset, need_dx, need_dw, False, dw_dtype)
        dx, dw, *third = self._backward(given, options)
        other = third[0] if dresidual is not None and dresidual.dtype != x.dtype else None
        none = x.new_empty(0)
        return tuple(none.clone() if result is None else result for result in (dx, dw, other))


def _own_library(wanted: str) -> tuple[torch.library.Library, str]:
    """A namespace nobody has: a second copy of a package in one process gets a number."""
    number = 1
    while True:
        namespace = wanted if number == 1 else f"{wanted}_{number}"
        try:
            return torch.library.Library(namespace, "DEF"), namespace
        except RuntimeError as error:
            if not re.search("single TORCH_LIBRARY", str(error)):
                raise
        number += 1


# ---- What the results look like -----------------------------------------------------------------


def _rstd_like(x: torch.Tensor) -> torch.Tensor:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty((*x.shape[:-1], 1), dtype=wide)


def _fake_rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float | None, weight_offset: float
) -> tuple[torch.Tensor, ...]:
    return x.new_empty(x.shape), _rstd_like(x)


def _fake_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float | None,
    weight_offset: float,
) -> tuple[torch.Tensor, ...]:
    return x.new_empty(x.shape), _rstd_like(x), residual.new_empty(x.shape)


def _fake_rms_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    dresidual: torch.Tensor | None,
    dw_dtype: torch.dtype | None,
    weight_offset: float,
    need_dx: bool,
    need_dw: bool,
) -> tuple[torch.Tensor, ...]:
    dx, dw, third = (x.new_empty(0) for _ in range(3))
    if need_dx:
        dx = x.new_empty(x.shape)
    if need_dw and weight is not None:
        dw = weight.new_empty(weight.shape, dtype=dw_dtype or weight.dtype)
    if dresidual is not None and dresidual.dtype != x.dtype:
        third = dresidual.new_empty(x.shape)
    return dx, dw, third
