"""RMSNorm forward of an emitted package: the choice of a kernel, and what serves the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..launch.forward_call import ForwardCall, forward_call
from ..launch.row_layout import alignment_of, row_layout
from ..table import MAX_ALIGNMENT, ForwardTable
from ..torch_internals import resolved
from .call_cache import CallCache
from .checks import check_forward, foreign_device
from .kernels import Kernels, Source
from .options import DTYPES
from .reference import reference_forward
from .warn_once import WarnOnce


class Forward:
    """RMSNorm forward by the kernels of a package, by ATen or the formula where it has none.
    Constructing it does not touch CUDA. Safe to share between threads.

    source: where the kernels are. A package without a forward table is served by ATen and the
    formula.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.warn = WarnOnce()
        # The keys say if there are no weight and no residual: a cache has calls with equally many.
        self._calls = {(w, r): CallCache() for w in (False, True) for r in (False, True)}
        # native/ serves what it was taught, or gives None; it is taught what has just served.
        self.native: Callable[..., tuple[torch.Tensor, ...] | None] | None = None
        self.learn: Callable[[Any], None] | None = None

    @property
    def table(self) -> ForwardTable | None:
        """The table of the GPU that this process uses."""
        return self._table_of(self._source(None))

    def _table_of(self, kernels: Kernels) -> ForwardTable | None:
        """Return those of a folder's forward kernels that may serve."""
        return kernels.forward

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        eps: float | None = None,
        weight_offset: float = 0.0,
        residual: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Return (y, rstd) of y = x * rstd * (weight_offset + weight), rstd = 1 / sqrt(mean(x^2) +
        eps).

        x: (..., N), bf16, fp16 or fp32, in any layout. weight: (N,) of x's dtype or fp32, None for
        ones. eps: None for the machine epsilon of fp32 (of float64 for float64 rows), as
        torch.nn.functional.rms_norm has it. y: contiguous, x's shape and dtype, rounded once from
        fp32. rstd: fp32, x.shape[:-1] + (1,).

        residual: of x's shape. The answer is then (y, rstd, residual_out): residual_out is
        x + residual, added in fp32 and rounded to the residual's dtype, contiguous; what is
        normalised is residual_out as rounded, so that the backward's x is residual_out exactly.

        Runs on the current stream, never waits, may be captured into a CUDA graph. No gradient
        flows through the results. CPU, meta and fake tensors are served by the formula.
        Raises TypeError or ValueError for arguments that do not fit, LaunchError when the driver
        refuses a launch.
        """
        if self.native is not None:
            found = self.native(x, weight, residual, eps, weight_offset)
            if found is not None:
                return found
        calls = self._calls[weight is None, residual is None]
        tensors = (x,) if weight is None else (x, weight)
        if residual is not None:
            tensors = (*tensors, residual)
        call = calls.find_recent(tensors)
        if call is not None:
            at = x.data_ptr()  # addresses are no part of the check
            if weight is not None:
                at |= weight.data_ptr()
            if residual is not None:
                at |= residual.data_ptr()
            if at % MAX_ALIGNMENT == 0:
                results: tuple[torch.Tensor, ...] = call(x, weight, eps, weight_offset, residual)
                if self.learn is not None:
                    self.learn(call)
                return results
        return self._run(calls, tensors, x, weight, eps, weight_offset, residual)

    def _run(
        self,
        calls: CallCache,
        tensors: tuple[torch.Tensor, ...],
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float | None,
        weight_offset: float,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        """Serve any call: known, or prepared now. calls: the cache of those with such `tensors`."""
        for name, value in (("x", x), ("weight", weight), ("residual", residual)):
            if not isinstance(value, torch.Tensor) and (value is not None or name == "x"):
                raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
        if isinstance(x, FakeTensor):  # its sizes may be symbols, and no key of a cache
            check_forward(x, weight, residual)
            return reference_forward(x, weight, eps, weight_offset, residual)
        known = calls.find(x.shape, tensors)
        if known is not None:
            results: tuple[torch.Tensor, ...] = known.call(x, weight, eps, weight_offset, residual)
            if self.learn is not None:
                self.learn(known.quick)
            return results
        if any(tensor.is_neg() for tensor in tensors):
            return self(resolved(x), resolved(weight), eps, weight_offset, resolved(residual))
        call = self._prepare(x, weight, residual)
        calls.add(x.shape, tensors, call, call)
        return call(x, weight, eps, weight_offset, residual)

    def warmup(self, shapes: Iterable[tuple[int, int, str, str]], residual: str = "") -> None:
        """Load the kernels of some shapes on the current CUDA device. shapes: M >= 1, N, dtype and
        weight dtype of each; residual: dtype of a residual stream, "" for none. dtypes: bf16, fp16
        or fp32. Raises LaunchError."""
        device = torch.cuda.current_device()
        kernels = self._source(device)
        table = self._table_of(kernels)
        if table is None or foreign_device(table.target, device):
            return
        for M, N, dtype, weight_dtype in shapes:
            if residual not in ("", dtype):
                dtype = weight_dtype = "fp32"  # `_mixed` calls these
            choice = table.choose(M, N, dtype, weight_dtype)
            if choice.kernel is not None:
                kernels.loaded.get(choice.kernel).load(device)

    def _prepare(
        self, x: torch.Tensor, weight: torch.Tensor | None, residual: torch.Tensor | None
    ) -> ForwardCall:
        """Check the arguments and decide what serves every call of their signature."""
        check_forward(x, weight, residual)
        if x.device.type in ("cpu", "meta") or x.numel() == 0:
            return reference_forward
        if x.device.type != "cuda":
            raise ValueError(f"x is on {x.device}: CUDA, CPU and meta tensors are served")
        if weight is not None and weight.dim() > 1:
            return self._per_head
        if residual is not None and residual.dtype != x.dtype:
            return self._mixed
        weight_dtype = x.dtype if weight is None else weight.dtype
        if x.dtype not in DTYPES or weight_dtype not in DTYPES:
            return self._fallback(f"there is no forward kernel for {x.dtype}")
        kernels = self._source(x.device.index)
        table = self._table_of(kernels)
        if table is None:
            return self._fallback("this package has no forward kernels")
        if foreign := foreign_device(table.target, x.device.index):
            return self._fallback(foreign)
        N = x.shape[-1]
        M = x.numel() // N
        x_layout = row_layout(x)  # None: a copy has to be made
        residual_layout = None if residual is None else row_layout(residual)
        if residual_layout is not None and residual_layout.inner:
            residual_layout = None  # the kernel takes one stride here
        places = N * x.element_size()
        for tensor, layout in ((x, x_layout), (residual, residual_layout)):
            if tensor is not None and layout is not None:
                places |= tensor.data_ptr() | (layout.stride | layout.outer) * x.element_size()
        kernel = table.choose(
            M,
            N,
            DTYPES[x.dtype],
            DTYPES[weight_dtype],
            alignment_of(places),
            alignment_of(0 if weight is None else weight.data_ptr()),
        ).kernel
        if kernel is None:
            return self._fallback(f"no forward kernel serves rows of {N} {x.dtype}")
        loaded = kernels.loaded.get(kernel)
        return forward_call(loaded, x, weight, residual, x_layout, residual_layout)

    def _per_head(
        self, x: Any, weight: Any, eps: Any, offset: float, residual: Any
    ) -> tuple[Any, ...]:
        """Serve a weight per head, (H, N) with x (..., H, N), by a call per head, on its slice of
        the rows."""
        heads = []
        for h in range(len(weight)):
            slice_of_residual = None if residual is None else residual[..., h, :]
            heads.append(self(x[..., h, :], weight[h], eps, offset, slice_of_residual))
        return tuple(torch.stack(parts, -2) for parts in zip(*heads, strict=True))

    def _mixed(
        self, x: Any, weight: Any, eps: Any, offset: float, residual: Any
    ) -> tuple[Any, ...]:
        """Serve a residual of another dtype: PyTorch adds, the fp32 kernel normalises the rounded
        sum, and y is rounded from its fp32 to x's dtype: the same numbers as in one kernel."""
        with torch.no_grad():
            stream = (x.float() + residual.float()).to(residual.dtype).contiguous()
            wide = None if weight is None else weight.float()
            y, rstd = self(stream.float(), wide, eps, offset)
            return y.to(x.dtype), rstd, stream

    def _fallback(self, reason: str) -> ForwardCall:
        self.warn(f"{reason}; using PyTorch's own")
        return aten_forward


def aten_forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float | None,
    weight_offset: float,
    residual: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Call PyTorch's fused kernel where it computes the same function, else the formula."""
    same = residual is None and weight_offset == 0 and (weight is None or weight.dtype == x.dtype)
    if not (same and hasattr(torch.ops.aten, "_fused_rms_norm")):
        return reference_forward(x, weight, eps, weight_offset, residual)
    with torch.no_grad():
        y, rstd = torch.ops.aten._fused_rms_norm(x.contiguous(), [x.shape[-1]], weight, eps)
    return y, rstd
