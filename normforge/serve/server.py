"""Leads from the arguments of a backward to what serves it: a kernel, several calls of one, or
PyTorch.

`_quick` serves what is most frequent, `_run` any call; both ask the call cache. What is new is
prepared once: `_find` checks the arguments and chooses a kernel, `composition` takes away what that
kernel lacks, and `_fallback` says what serves the rest."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ..launch.row_layout import alignment_of
from ..launch.workspace import Workspaces
from ..native.native import Native
from ..spec import KernelSpec, Launch, plan_launch
from ..table import Choice, Table
from ..torch_internals import resolved
from .call import Call, KernelCall, aten_call, formula
from .call_cache import CallCache
from .checks import check_arguments, check_dx_out, check_overlap, foreign_device
from .collect import collecting
from .kernels import Source
from .layout import read_layout
from .options import (
    DTYPES,
    PLAIN,
    SMALLEST_EPS,
    Arguments,
    Composition,
    FormulaOptions,
    Options,
    composition,
    may_overwrite_dy,
)
from .reference import Results
from .warn_once import WarnOnce

_OPTIONAL = ("weight", "dresidual", "dw_out", "mean", "dx_out")


class Server:
    """The backward of one package, or of the packages of several GPUs: what serves which call.

    source: where its kernels are. Making one compiles nothing and does not touch CUDA. Safe to use
    from several threads.
    """

    operation: ClassVar[str]
    """The operation that its tables have kernels of."""
    _aten_call = staticmethod(aten_call)
    """Makes a call of PyTorch's own kernel, for the norm that this is of."""
    _has_aten = hasattr(torch.ops.aten, "_fused_rms_norm_backward")
    _invariant: ClassVar[bool] = False
    """True when no bit of a row's results may depend on the batch."""
    _advice: ClassVar[str] = ""
    """The advice for calls that only these kernels may serve when there is none."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.warn = WarnOnce()
        self._calls = CallCache()
        self._workspaces = Workspaces()
        self._native = Native()

    @property
    def table(self) -> Table:
        """The table of the GPU that this process uses."""
        return self._source(None).backward

    def _quick(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        rstd: torch.Tensor,
        weight: torch.Tensor,
        mean: torch.Tensor | None = None,
    ) -> Results | None:
        """Return dx and dw of a plain call (a weight, both wanted, no option) like one that came
        before; None for any other. Most entry points try this before `_run`."""
        tensors = (dy, x, rstd, weight) if mean is None else (dy, x, rstd, weight, mean)
        call = self._calls.find_recent(tensors)
        if call is None or (torch.is_grad_enabled() and (dy.requires_grad or x.requires_grad)):
            return None
        results: Results | None = call(dy, x, rstd, weight, mean)
        recorder = collecting.recorder  # read once: another thread may stop it
        if recorder is not None and results is not None:
            recorder.count(self.operation, x, weight)
        if self._native.learn is not None and results is not None:
            self._native.learn(call)
        return results

    def _run(self, given: Arguments, options: Options, routed: bool = False) -> Results:
        """Serve any call on this process's tensors: known, or prepared now. routed: it comes from
        `_route`, which gets None where there is no kernel; `rmsnorm_backward` answers the same call
        with PyTorch's."""
        calls, tensors = self._calls, tuple(vars(given).values())  # `_calls` may be replaced
        if type(options) is FormulaOptions:
            if self._advice and given.x.is_cuda:
                what = f"no kernel serves an eps below {SMALLEST_EPS:.0e}"
                raise RuntimeError(f"{what}, and {self._advice}")
            return formula(options)(*tensors)
        recorder = collecting.recorder
        if recorder is not None and not recorder.inside:
            offset = options.weight_offset != 0
            with recorder.call(self.operation, given.x, given.weight, offset, given.dresidual):
                return self._run(given, options, routed)
        for name, value in vars(given).items():
            # PyTorch takes a while to say that None is no tensor.
            fits = name in _OPTIONAL if value is None else isinstance(value, torch.Tensor)
            if not fits:
                raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
        present = [tensor for tensor in tensors if tensor is not None]
        over_dy = None  # there is no dx_out
        if given.dx_out is not None:
            check_dx_out(given, options)
            check_overlap(given)
            over_dy = given.dx_out.data_ptr() == given.dy.data_ptr()
        which = (routed, given.weight is None, given.dresidual is None, given.dw_out is None)
        kind = (*which, over_dy, given.x.shape, options)
        known = calls.find(kind, present)
        if known is not None:
            results: Results = known.call(*tensors)
            if self._native.learn is not None:
                self._native.learn(known.quick)
            return results
        if any(tensor.is_neg() for tensor in present):
            return self._run(_resolved(given), options, routed)
        call = self._prepare_routed(given, options) if routed else self._prepare(given, options)
        quick = getattr(call, "quick", None) if options == PLAIN else None
        calls.add(kind, present, call, quick)
        return call(*tensors)

    def _route(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        rstd: torch.Tensor,
        weight: torch.Tensor | None,
        need_dx: bool,
        need_dw: bool,
        mean: torch.Tensor | None = None,
    ) -> Results | None:
        """Serve a call under `install()` like `rmsnorm_backward`, but give None for what there is
        no kernel for."""
        options = Options(need_dx=need_dx, need_dw=need_dw)
        given = Arguments(dy, x, rstd, weight, mean=mean)
        return self._run(given, options, routed=True)

    def _prepare_routed(self, given: Arguments, options: Options) -> Call:
        """Return what serves every routed call of a signature; for PyTorch's kernel it gives
        None."""
        try:
            found = self._find(given, options)
        except (TypeError, ValueError):  # PyTorch says what is wrong in its own words
            return _leave_it
        if isinstance(found, str):
            self.warn(f"{found}; using PyTorch's own kernel")
            return _leave_it
        return found

    def _prepare(self, given: Arguments, options: Options) -> Call:
        """Check the arguments and decide what serves every call of their signature."""
        found = self._find(given, options)
        return self._fallback(found, given, options) if isinstance(found, str) else found

    def _find(self, given: Arguments, options: Options) -> Call | str:
        """Return what serves a call by a kernel or, off the GPU, by the formula; else why nothing
        does."""
        check_arguments(given, options)
        x = given.x
        if x.device.type in ("cpu", "meta") or x.numel() == 0:
            return formula(options)
        if x.device.type != "cuda":
            raise ValueError(f"x is on {x.device}: CUDA, CPU and meta tensors are served")
        if x.dtype not in DTYPES:
            return f"there is no kernel for {x.dtype}"
        return self._with_kernel(given, options, x.device.index)

    def _with_kernel(self, given: Arguments, options: Options, device: int) -> Call | str:
        """Return what serves a call on a CUDA device by one kernel, or by several calls that do."""
        x, weight = given.x, given.weight
        if weight is not None and weight.dim() > 1:
            composed = composition(given, options, None)
            assert composed is not None
            return self._composed(composed, options)
        layout, alignment = read_layout(given)
        weight_at = 0 if weight is None or layout.copy.weight else weight.data_ptr()
        names = (DTYPES[x.dtype], DTYPES[x.dtype if weight is None else weight.dtype])
        residual = "" if given.dresidual is None else DTYPES.get(given.dresidual.dtype, "")
        shape = (layout.rows, layout.columns, *names)
        choice = self._best(
            device,
            shape,
            options.weight_offset != 0,
            residual,
            alignment=alignment,
            weight_alignment=alignment_of(weight_at),
            first_alignment=layout.first_alignment,
        )
        kernel = choice.kernel
        over_dy = kernel is not None and may_overwrite_dy(kernel.config, kernel.spec.row_period)
        composed = composition(given, options, None if kernel is None else kernel.spec, over_dy)
        if composed is not None:
            return self._composed(composed, options)
        if kernel is None:
            return choice.reason
        loaded = self._source(device).loaded.get(kernel)
        launch = self._launch(kernel.spec, layout.rows)
        return KernelCall(loaded, launch, device, given, options, layout, self._workspaces)

    def _launch(self, spec: KernelSpec, rows: int) -> Launch:
        return plan_launch(spec, rows)

    def _composed(self, compose: Composition, options: Options) -> Call:
        def call(*tensors: Any) -> Results:
            with torch.no_grad():
                return compose(self._run, Arguments(*tensors), options)

        return call

    def _best(
        self,
        device: int,
        shape: tuple[int, int, str, str],
        offset: bool,
        residual: str,
        **alignments: Any,
    ) -> Choice:
        """A kernel with as many of the options compiled into it as there are; what it lacks is
        composed. shape: M, N and both dtypes."""
        table = self._source(device).backward
        if foreign := foreign_device(table.target, device):
            return Choice("none", foreign)
        call_options = ((offset, residual), (offset, ""), (False, residual), (False, ""))
        for with_offset, reads in dict.fromkeys(call_options):
            choice = table.choose(*shape, offset=with_offset, residual=reads, **alignments)
            if choice.kernel is not None:
                break
        return choice

    def _fallback(self, reason: str, given: Arguments, options: Options) -> Call:
        """Return what serves a call that has no kernel. Options other than what is wanted were
        composed away before, but not for a dtype that no kernel has, which goes to the formula."""
        weight = given.weight
        if given.x.dtype not in DTYPES:
            self.warn(f"{reason}; using the formula in plain PyTorch")
            return formula(options)
        same = weight is None or weight.dtype == given.x.dtype
        if self._has_aten and same and (options.dw_dtype is None or not options.need_dw):
            self.warn(f"{reason}; using PyTorch's own kernel")
            return self._aten_call(options)
        self.warn(f"{reason}, and no fused one in PyTorch; using the formula in plain PyTorch")
        return formula(options)


def _leave_it(*_: Any) -> Any:
    return None


def _resolved(given: Arguments) -> Arguments:
    """Return arguments with the same numbers as they lie in memory. Raises ValueError for a dw_out
    or dx_out that is a view of others."""
    for name in ("dw_out", "dx_out"):
        out = getattr(given, name)
        if out is not None and out.is_neg():
            raise ValueError(f"{name} is a lazily negated view: give the tensor behind it")
    return Arguments(**{name: resolved(tensor) for name, tensor in vars(given).items()})
