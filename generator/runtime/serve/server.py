"""From the arguments of a call to what serves it: a kernel, several calls of one, or PyTorch."""

from __future__ import annotations

import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import torch

from ..launch.launch import LoadedKernel
from ..launch.row_layout import power_of_two, read_layout
from ..launch.workspace import Workspaces
from ..native.native import Native
from ..spec import plan_launch
from ..table import MAX_ALIGNMENT, Choice, Kernel, Table, runs_on
from ..torch_internals import resolved
from .call import Call, aten_call, formula, kernel_call
from .call_cache import Known
from .checks import DTYPES, check_arguments
from .options import PLAIN, Arguments, Composition, Options, composition, per_head
from .reference import Results

_OPTIONAL = ("weight", "dresidual", "dw_out")
_UNKNOWN = object()
_ROUTED = object()
_MOST_CALLS = 4096  # signatures remembered; only a program whose M changes all the time meets more


class Server:
    """The kernels of one package as they get loaded, and what serves which signature.

    Reading it compiles nothing and does not touch CUDA. Safe to use from several threads.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.table = Table.load(folder)
        self._lock = threading.Lock()
        self._loaded: dict[Kernel, LoadedKernel] = {}
        self._calls: dict[tuple[Any, ...], Call] = {}
        self._known = Known("cuda")
        self._routed: dict[tuple[Any, ...], Any] = {}  # a Call, None for PyTorch's kernel
        self._workspaces = Workspaces()
        self._native = Native()
        self._warned: set[str] = set()

    def _run(self, given: Arguments, options: Options) -> Results:
        """Any call on this process's tensors: known from its signature, or prepared now."""
        tensors = tuple(vars(given).values())
        for name, value in vars(given).items():
            if not isinstance(value, torch.Tensor) and not (value is None and name in _OPTIONAL):
                raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
        key = _key(given, options)
        if (call := self._known.find(key, _present(tensors))) is not None:
            results = call(*tensors)
            if self._native.learn is not None:
                self._native.learn(_quick(call, options))
            return results
        given = _resolved(given)
        tensors = tuple(vars(given).values())
        signature = (options, *(_facts(tensor) for tensor in tensors))
        call = self._calls.get(signature)
        if call is None:
            call = self._prepare(given, options)
            if len(self._calls) >= _MOST_CALLS:
                self._calls.clear()
            self._calls[signature] = call
        else:
            self._known.add(key, _present(tensors), call, _quick(call, options))
        return call(*tensors)

    def _route(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        rstd: torch.Tensor,
        weight: torch.Tensor | None,
        need_dx: bool,
        need_dw: bool,
    ) -> Results | None:
        """`install()`: like `rmsnorm_backward`, but None for what there is no kernel for."""
        given = Arguments(dy, x, rstd, weight)
        options = Options(need_dx=need_dx, need_dw=need_dw)
        tensors = tuple(vars(given).values())
        # `rmsnorm_backward` may know the same call as one of PyTorch's own kernel.
        key = (_ROUTED, *_key(given, options))
        if (call := self._known.find(key, _present(tensors))) is not None:
            return call(*tensors)
        given = _resolved(given)
        tensors = tuple(vars(given).values())
        signature = (options, *(_facts(tensor) for tensor in tensors))
        call = self._routed.get(signature, _UNKNOWN)
        if call is _UNKNOWN:
            try:
                found = self._find(given, options)
            except (TypeError, ValueError):  # PyTorch says what is wrong in its own words
                found = ""
            if isinstance(found, str) and found:
                self.warn(f"{found}; using PyTorch's own kernel")
            call = None if isinstance(found, str) else found
            if len(self._routed) >= _MOST_CALLS:
                self._routed.clear()
            self._routed[signature] = call
        if call is None:
            return None
        self._known.add(key, _present(tensors), call, _quick(call, options))
        return call(*tensors)

    def _backward(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        rstd: torch.Tensor,
        weight: torch.Tensor | None = None,
        *,
        dresidual: torch.Tensor | None = None,
        dw_out: torch.Tensor | None = None,
        **options: Any,
    ) -> Results:
        """`rmsnorm_backward` as compositions call it."""
        return self._run(Arguments(dy, x, rstd, weight, dresidual, dw_out), Options(**options))

    def _prepare(self, given: Arguments, options: Options) -> Call:
        """Check the arguments and decide what serves every call of their signature."""
        found = self._find(given, options)
        return self._fallback(found, given, options) if isinstance(found, str) else found

    def _find(self, given: Arguments, options: Options) -> Call | str:
        """What serves a call by a kernel or, off the GPU, by the formula; else why not."""
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
        """What serves a call on a CUDA device by one kernel, or by several calls that do."""
        x, weight = given.x, given.weight
        if weight is not None and weight.dim() > 1:
            return self._composed(per_head, options)
        layout, places = read_layout(given)
        alignments: dict[str, Any] = {
            "alignment": power_of_two(places, MAX_ALIGNMENT),
            "weight_alignment": _alignment(None if layout.copy[3] else weight),
            "residual_alignment": MAX_ALIGNMENT,  # others are copied
        }
        names = (DTYPES[x.dtype], DTYPES[x.dtype if weight is None else weight.dtype])
        residual = "" if given.dresidual is None else DTYPES.get(given.dresidual.dtype, "")
        shape = (layout.rows, layout.columns, *names)
        choice = self._best(device, shape, options.weight_offset != 0, residual, **alignments)
        spec = None if choice.kernel is None else choice.kernel.spec
        composed = composition(given, options, spec)
        if composed is not None:
            return self._composed(composed, options)
        if choice.kernel is None:
            return choice.reason
        return kernel_call(
            kernel=self._kernel(choice.kernel),
            launch=plan_launch(choice.kernel.spec, layout.rows),
            device=device,
            given=given,
            options=options,
            layout=layout,
            workspaces=self._workspaces,
        )

    def _composed(self, composition: Composition, options: Options) -> Call:
        def call(*tensors: Any) -> Results:
            with torch.no_grad():
                return composition(self._backward, Arguments(*tensors), options)

        return call

    def _choose(
        self, device: int, M: int, N: int, dtype: str, weight_dtype: str, **call_options: Any
    ) -> Choice:
        properties = torch.cuda.get_device_properties(device)
        target = self.table.target
        if not runs_on(target["arch"], (properties.major, properties.minor)):
            made_for = f"these kernels are for {target['title']} ({target['arch']})"
            return Choice("none", f"{made_for} and do not run on {properties.name}")
        return self.table.choose(M, N, dtype, weight_dtype, **call_options)

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
        call_options = ((offset, residual), (offset, ""), (False, residual), (False, ""))
        for with_offset, reads in dict.fromkeys(call_options):
            choice = self._choose(device, *shape, offset=with_offset, residual=reads, **alignments)
            if choice.kernel is not None:
                break
        return choice

    def _kernel(self, kernel: Kernel) -> LoadedKernel:
        with self._lock:
            if kernel not in self._loaded:
                cubin = kernel.read_cubin(self.folder)
                self._loaded[kernel] = LoadedKernel(cubin, kernel.spec, self.warn)
            return self._loaded[kernel]

    def _fallback(self, reason: str, given: Arguments, options: Options) -> Call:
        """What serves a call that has no kernel. Options other than what is wanted were composed
        away before, but not for a dtype that no kernel has, which goes to the formula."""
        weight = given.weight
        if given.x.dtype not in DTYPES:
            self.warn(f"{reason}; using the formula in plain PyTorch")
            return formula(options)
        same = weight is None or weight.dtype == given.x.dtype
        has_aten = hasattr(torch.ops.aten, "_fused_rms_norm_backward")
        if has_aten and same and (options.dw_dtype is None or not options.need_dw):
            self.warn(f"{reason}; using PyTorch's own kernel")
            return aten_call(options)
        self.warn(f"{reason}, and no fused one in PyTorch; using the formula in plain PyTorch")
        return formula(options)

    def warn(self, sentence: str) -> None:
        """Warn once per sentence, at the first frame outside this package."""
        if sentence not in self._warned:
            self._warned.add(sentence)
            warnings.warn(sentence, stacklevel=_first_frame_outside())


def _first_frame_outside() -> int:
    runtime = __name__.rpartition(".serve.")[0]
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__package__")).startswith(runtime):
        frame, level = frame.f_back, level + 1
    return level


def _alignment(tensor: torch.Tensor | None) -> int:
    return MAX_ALIGNMENT if tensor is None else power_of_two(tensor.data_ptr(), MAX_ALIGNMENT)


def _key(given: Arguments, options: Options) -> tuple[Any, ...]:
    """Where the calls of one shape are looked for: which tensors there are, and the options."""
    here = (given.weight is None, given.dresidual is None, given.dw_out is None)
    return (*here, given.x.shape, options)


def _resolved(given: Arguments) -> Arguments:
    """The same numbers as they lie in memory. Raises ValueError for a dw_out that is a view of
    others."""
    if given.dw_out is not None and given.dw_out.is_neg():
        raise ValueError("dw_out is a lazily negated view: give the tensor that it is a view of")
    return Arguments(**{name: resolved(tensor) for name, tensor in vars(given).items()})


def _present(tensors: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _quick(call: Call, options: Options) -> Any:
    """What the entry points try first: a kernel's quick call, which takes dy, x, rstd and weight."""
    return getattr(call, "quick", None) if options == PLAIN else None


def _facts(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    """All that the checks and the choice of a kernel depend on."""
    if tensor is None:
        return None
    return (
        *(tensor.shape, tensor.stride(), tensor.dtype, tensor.device),
        tensor.data_ptr() % MAX_ALIGNMENT if tensor.is_cuda else 0,
    )
