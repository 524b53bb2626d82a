"""The operators of a package: what torch.compile, tracers, checkpointing and DTensor see of it.

They are functional: nothing is mutated and no result is an argument. Their namespace has the
package's digest in its name, so a graph that was compiled with one package, and every cache of it,
is never taken for that of another, nor for that of an older runtime.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.compiler import is_dynamo_compiling

from ..serve.call import QuickCall
from ..serve.checks import check_dx_out, check_options
from ..serve.options import Arguments, Backward, FormulaOptions, Options, dw_shape
from ..serve.reference import Results, wide_dtype
from ..torch_internals import is_plain, nothing_like, watched
from .gradients import (
    Implementation,
    autograd_of_backward,
    autograd_of_norm,
    wants_gradient,
    without_gradient,
)
from .routes import RMS_NORM_ROUTES, Routes

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


class NormOperators:
    """The operators of one package, registered when this is constructed and for the life of the
    process.

    backward(arguments, options): what serves any backward, quick: what is tried before for a plain
    one; neither may call an operator again.
    """

    layer: ClassVar[str]
    """What it is called."""
    aten: ClassVar[tuple[str, ...]]
    """PyTorch's operators of it, forward and backward."""
    routes: ClassVar[Routes]
    """How those go to the operators here, in a graph."""
    schemas: ClassVar[Mapping[str, str]]
    """Of the operators here, by their names."""
    backward_operator: Any
    """The one that `_define_backward` gave."""

    def __init__(self, digest: str, backward: Backward, quick: QuickCall) -> None:
        self._backward, self._quick = backward, quick
        self._library, self.namespace = _own_library(f"normforge_{digest}")

    def _define_backward(self, name: str) -> Any:
        run = self._run_backward
        operator = self.backward_operator = self._define(name, run, self._fake_backward)
        self._differentiate(name, autograd_of_backward(operator, run))
        return operator

    def _define(self, name: str, run: Implementation, fake: Implementation) -> Any:
        """The operator of this name. run: computes its results; fake: says what they look like."""
        self._library.define(name + self.schemas[name])
        for device in ("CPU", "CUDA"):
            self._library.impl(name, run, device)
        torch.library.register_fake(f"{self.namespace}::{name}", fake, lib=self._library)
        return getattr(getattr(torch.ops, self.namespace), name).default

    def _differentiate(self, name: str, kernel: Implementation) -> None:
        self._library.impl(name, kernel, "Autograd", with_keyset=True)

    def serve(self, run: Backward, given: Arguments, options: Options) -> Results:
        """Any backward: through the operator where somebody watches those, else at once by `run`.
        Who asks its results for a gradient gets an error."""
        wants = given.dx_out is not None and getattr(given.dx_out, "requires_grad", False)
        if wants and torch.is_grad_enabled():
            raise RuntimeError("dx_out requires a gradient, but dx has none: give dx_out.detach()")
        if watched() or not all(map(is_plain, vars(given).values())):
            return self.backward(given, options)
        if wants_gradient(given):
            return without_gradient(run, given, options)
        return run(given, options)

    def backward(self, given: Arguments, options: Options) -> Results:
        """Any backward through the operator. `dw_out` and `dx_out` are written by operators of
        PyTorch, which a tracer understands, and so is the formula made of them."""
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
        # What is compiled would ask at once for the gradient that is refused.
        with torch.no_grad() if is_dynamo_compiling() else nullcontext():
            dx, dw, third = self.backward_operator(
                *(given.dy, given.x, given.rstd, given.weight, given.dresidual),
                *(dw_dtype, options.weight_offset, options.need_dx, need_dw),
                *(() if given.mean is None else (given.mean,)),
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

    def _run_backward(
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
        mean: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        if (
            (need_dx and need_dw and weight is not None)
            and (dresidual is None and dw_dtype is None)
            and weight_offset == 0
        ):
            found = self._quick(dy, x, rstd, weight, mean)
            if found is not None:
                return (*found, nothing_like(x))  # type: ignore[arg-type]
        given = Arguments(dy, x, rstd, weight, dresidual, mean=mean)
        options = Options(weight_offset, need_dx, need_dw, False, dw_dtype)
        dx, dw, *third = self._backward(given, options)
        other = third[0] if dresidual is not None and dresidual.dtype != x.dtype else None
        # No result may be another one, nor one of another call.
        return tuple(nothing_like(x) if result is None else result for result in (dx, dw, other))

    @staticmethod
    def _fake_backward(
        dy: torch.Tensor,
        x: torch.Tensor,
        rstd: torch.Tensor,
        weight: torch.Tensor | None,
        dresidual: torch.Tensor | None,
        dw_dtype: torch.dtype | None,
        weight_offset: float,
        need_dx: bool,
        need_dw: bool,
        mean: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        dx, dw, third = (x.new_empty(0) for _ in range(3))
        if need_dx:
            dx = x.new_empty(x.shape)
        if need_dw and weight is not None:
            shape = dw_shape(Arguments(dy, x, rstd, weight, mean=mean))
            dw = weight.new_empty(shape, dtype=dw_dtype or weight.dtype)
        if dresidual is not None and dresidual.dtype != x.dtype:
            third = dresidual.new_empty(x.shape)
        return dx, dw, third


class Operators(NormOperators):
    """Those of RMSNorm. forward(x, weight, eps, weight_offset, residual) gives (y, rstd[,
    residual_out]), and may not call an operator either."""

    layer = "RMSNorm"
    aten = ("_fused_rms_norm", "_fused_rms_norm_backward")
    routes, schemas = RMS_NORM_ROUTES, SCHEMAS

    def __init__(
        self, digest: str, forward: Implementation, backward: Backward, quick: QuickCall
    ) -> None:
        super().__init__(digest, backward, quick)
        self._forward = forward
        self.rms_norm_backward = self._define_backward("rms_norm_backward")
        self.rms_norm = self._define_norm("rms_norm", self._rms_norm, self._fake_rms_norm)
        self.add_rms_norm = self._define_norm(
            "add_rms_norm", self._add_rms_norm, self._fake_add_rms_norm
        )
        self.all = (self.rms_norm, self.add_rms_norm, self.rms_norm_backward)

    def _define_norm(self, name: str, run: Implementation, fake: Implementation) -> Any:
        operator = self._define(name, run, fake)
        self._differentiate(name, autograd_of_norm(operator, run, self.backward))
        return operator

    def _rms_norm(self, x: Any, weight: Any, eps: Any, offset: float) -> tuple[torch.Tensor, ...]:
        return self._forward(x, weight, eps, offset, None)

    def _add_rms_norm(self, x: Any, residual: Any, weight: Any, eps: Any, offset: float) -> Any:
        return self._forward(x, weight, eps, offset, residual)

    @staticmethod
    def _fake_rms_norm(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
        return x.new_empty(x.shape), statistic_like(x)

    @staticmethod
    def _fake_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        return x.new_empty(x.shape), statistic_like(x), residual.new_empty(x.shape)


def statistic_like(x: torch.Tensor) -> torch.Tensor:
    """What a forward saves of every row, such as rstd, of any content."""
    return x.new_empty((*x.shape[:-1], 1), dtype=wide_dtype(x))


def _own_library(wanted: str) -> tuple[torch.library.Library, str]:
    """A namespace nobody has: a second copy of a package in one process gets a number."""
    number = 1
    while True:
        namespace = wanted if number == 1 else f"{wanted}_{number}"
        try:
            return torch.library.Library(namespace, "DEF"), namespace
        except RuntimeError as error:
            if "single TORCH_LIBRARY" not in str(error):
                raise
        number += 1


def digest_of(folder: Path, schemas: Mapping[str, str]) -> str:
    """Eight hex digits that change with the tables of a package, and so with its kernels, with what
    its operators take, and with the code of the runtime. What PyTorch compiles and keeps on disk
    contains operators of these names, and backwards that were traced from the code."""
    content = b"".join(path.read_bytes() for path in sorted(folder.glob("*.json")))
    content += repr(schemas).encode() + code_digest(Path(__file__).resolve().parents[1])
    return hashlib.sha256(content).hexdigest()[:8]


@cache
def code_digest(folder: Path) -> bytes:
    """What changes with the Python files in a folder. A folder is read once."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(content)} ".encode() + content)
    return digest.digest()
