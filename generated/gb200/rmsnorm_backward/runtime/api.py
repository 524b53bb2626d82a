"""The functions of an emitted package."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from .call import (
    Call,
    Gradients,
    KernelCall,
    aten_backward,
    check_arguments,
    no_rows,
    power_of_two,
    row_stride,
)
from .dispatch import MAX_ALIGNMENT, Choice, Kernel, Table, runs_on
from .launch import LoadedKernel, current_stream
from .plan import plan_launch
from .reference import reference_backward
from .workspace import Workspaces

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_MOST_CALLS = 4096  # signatures remembered; only a program whose M changes all the time meets more


class Package:
    """One emitted package: its table, and its kernels as they get loaded.

    Reading it compiles nothing and does not touch CUDA. Safe to use from several threads.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.table = Table.load(folder)
        self._lock = threading.Lock()
        self._loaded: dict[Kernel, LoadedKernel] = {}
        self._calls: dict[tuple[Any, ...], Call] = {}
        self._workspaces = Workspaces()
        self._warned: set[str] = set()

    @property
    def provenance(self) -> dict[str, Any]:
        """The target, and for every tuned shape how its kernel was found and checked."""
        shapes = {
            entry.shape: {
                **entry.provenance,
                "kernel": entry.kernel.file,
                "determinism": entry.kernel.spec.determinism,
                "evidence": entry.evidence,
            }
            for entry in self.table.tuned
        }
        return {"target": self.table.target, "shapes": shapes}

    def rmsnorm_backward(
        self, dy: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor
    ) -> Gradients:
        """dx and dw of y = x * rstd * weight, where rstd = 1 / sqrt(mean(x^2) + eps) of each row.

        dy, x: (..., N) of one dtype (bf16, fp16, fp32), in any layout: rows that are contiguous in
        themselves are read in place, others are copied first. rstd: fp32, one value per row, as
        the forward saved it. weight: (N,), of x's dtype or fp32. Returns dx, contiguous and of
        x's shape and dtype, and dw, of the weight's. No gradient flows through the results.

        CPU and meta tensors (float64 too, with rstd in fp32 or float64) are served by the formula
        in PyTorch; what has no kernel here by ATen where it can, with one warning per reason.
        Everything runs on the current stream, may be captured into a CUDA graph and never waits.

        Raises TypeError or ValueError for arguments that do not fit, RuntimeError for what
        neither a kernel nor ATen serves, LaunchError when the driver refuses a launch.
        """
        try:
            # All that the checks and the choice of a kernel depend on, in the cheapest form.
            signature = (
                *(x.shape, x.is_contiguous() or x.stride(), x.dtype, x.get_device()),
                *(dy.shape, dy.is_contiguous() or dy.stride(), dy.dtype, dy.get_device()),
                *(rstd.numel(), rstd.is_contiguous(), rstd.dtype, rstd.get_device()),
                *(weight.shape, weight.is_contiguous(), weight.dtype, weight.get_device()),
                (x.data_ptr() | dy.data_ptr()) % MAX_ALIGNMENT,
                weight.data_ptr() % MAX_ALIGNMENT,
            )
        except AttributeError:
            for name, value in (("dy", dy), ("x", x), ("rstd", rstd), ("weight", weight)):
                if not isinstance(value, torch.Tensor):
                    kind = type(value).__name__
                    raise TypeError(f"{name} must be a torch.Tensor, got {kind}") from None
            raise
        call = self._calls.get(signature)
        if call is None:
            call = self._prepare(dy, x, rstd, weight)
            if len(self._calls) >= _MOST_CALLS:
                self._calls.clear()
            self._calls[signature] = call
        return call(dy, x, rstd, weight)

    def explain(
        self,
        M: int,
        N: int,
        dtype: str | torch.dtype,
        weight_dtype: str | torch.dtype | None = None,
    ) -> dict[str, Any]:
        """Which kernel serves M contiguous, aligned rows of N columns on this package's GPU, why,
        and what is known about it. Needs no GPU.

        dtype, weight_dtype: a torch dtype or bf16, fp16, fp32; the weight's is x's by default.
        Keys: shape, gpu, how (tuned, nearest, generic or none), reason; with a kernel also kernel,
        source, strategy, determinism (its class), evidence and launch; with a tuned one also
        tuned_shape and provenance (time, tie set, checks passed, study, date, …).
        """
        name = dtype_name(dtype)
        weight_name = name if weight_dtype is None else dtype_name(weight_dtype)
        if M < 1 or N < 1:
            raise ValueError(f"M and N must be at least 1, got M={M} and N={N}")
        choice = self.table.choose(M, N, name, weight_name)
        facts: dict[str, Any] = {
            "shape": {"M": M, "N": N, "dtype": name, "weight_dtype": weight_name},
            "gpu": self.table.target["title"],
            "how": choice.how,
            "reason": choice.reason,
        }
        if choice.kernel is None:
            return facts
        spec = choice.kernel.spec
        launch = plan_launch(spec, M)
        facts |= {
            "kernel": choice.kernel.file,
            "source": str(self.folder / "kernels" / f"{choice.kernel.file}.cu"),
            "strategy": spec.strategy,
            "determinism": spec.determinism,
            "evidence": choice.tuned.evidence if choice.tuned else "none: a safe, untuned config",
            "launch": {
                "kernels": 2 if launch.sum_grid else 1,
                "grid": launch.grid,
                "threads": spec.threads,
                "cluster": spec.cluster,
                "smem_bytes": spec.smem_bytes,
                "vector_bytes": spec.vector_bytes,
                "workspace_bytes": launch.workspace_bytes,
            },
        }
        if choice.tuned:
            facts["tuned_shape"] = choice.tuned.shape
            facts["provenance"] = choice.tuned.provenance
        return facts

    def warmup(
        self, shapes: Iterable[tuple[Any, ...]], device: torch.device | int | None = None
    ) -> None:
        """Load the kernels of some shapes on a CUDA device (by default the current one) and reserve
        the workspace of its current stream, so that no later call pays for either.

        shapes: (M, N, dtype) or (M, N, dtype, weight dtype) each, dtypes as in `explain`. Shapes
        that no kernel serves are left to the call. Raises LaunchError.
        """
        with torch.cuda.device(device):
            index = torch.cuda.current_device()
            workspace = self._workspaces.of_stream(index, current_stream(index))
            for M, N, dtype, *weight_dtype in shapes:
                name = dtype_name(dtype)
                weight_name = dtype_name(weight_dtype[0]) if weight_dtype else name
                choice = self._choose(index, M, N, name, weight_name)
                if choice.kernel is None:
                    continue
                self._kernel(choice.kernel).load(index)
                with workspace.lock:
                    workspace.fit(plan_launch(choice.kernel.spec, M))

    def _prepare(
        self, dy: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor
    ) -> Call:
        """Check the arguments and decide what serves every call of their signature."""
        check_arguments(dy, x, rstd, weight)
        if x.device.type in ("cpu", "meta"):
            return reference_backward
        if x.device.type != "cuda":
            raise ValueError(f"x is on {x.device}: CUDA, CPU and meta tensors are served")
        N = x.shape[-1]
        M = x.numel() // N
        if M == 0:
            return no_rows
        if x.dtype not in DTYPES:
            return self._fallback(f"there is no kernel for {x.dtype}", x, weight)
        strides = [row_stride(tensor) for tensor in (dy, x)]
        # A tensor that gets copied ends up aligned, with N elements from row to row.
        places = N * x.element_size()
        for tensor, stride in zip((dy, x), strides, strict=True):
            if stride is not None:
                places |= tensor.data_ptr() | stride * x.element_size()
        choice = self._choose(
            x.device.index,
            M,
            N,
            DTYPES[x.dtype],
            DTYPES[weight.dtype],
            alignment=power_of_two(places, MAX_ALIGNMENT),
            weight_alignment=power_of_two(weight.data_ptr(), MAX_ALIGNMENT),
        )
        if choice.kernel is None:
            return self._fallback(choice.reason, x, weight)
        launch = plan_launch(choice.kernel.spec, M)
        dy_stride, x_stride = (N if stride is None else stride for stride in strides)
        copies = (
            *(stride is None for stride in strides),
            *(not tensor.is_contiguous() for tensor in (rstd, weight)),
        )
        return KernelCall(
            kernel=self._kernel(choice.kernel),
            launch=launch,
            extent=(M, x_stride, dy_stride, N, N, launch.group),
            device=x.device.index,
            copies=copies if any(copies) else (),
            workspaces=self._workspaces,
        )

    def _choose(
        self, device: int, M: int, N: int, dtype: str, weight_dtype: str, **alignments: int
    ) -> Choice:
        properties = torch.cuda.get_device_properties(device)
        target = self.table.target
        if not runs_on(target["arch"], (properties.major, properties.minor)):
            made_for = f"these kernels are for {target['title']} ({target['arch']})"
            return Choice("none", f"{made_for} and do not run on {properties.name}")
        sms = properties.multi_processor_count
        return self.table.choose(M, N, dtype, weight_dtype, sms=sms, **alignments)

    def _kernel(self, kernel: Kernel) -> LoadedKernel:
        with self._lock:
            if kernel not in self._loaded:
                self._loaded[kernel] = LoadedKernel(kernel.read_cubin(self.folder), kernel.spec)
            return self._loaded[kernel]

    def _fallback(self, reason: str, x: torch.Tensor, weight: torch.Tensor) -> Call:
        if not hasattr(torch.ops.aten, "_fused_rms_norm_backward"):
            raise RuntimeError(f"{reason}, and PyTorch {torch.__version__} has no fused one either")
        if weight.dtype != x.dtype:
            raise RuntimeError(
                f"{reason}, and PyTorch's takes no {weight.dtype} weight with {x.dtype} rows"
            )
        if reason not in self._warned:
            self._warned.add(reason)
            # The frame of the caller of rmsnorm_backward.
            warnings.warn(f"{reason}; using PyTorch's own kernel", stacklevel=4)
        return aten_backward


def dtype_name(dtype: str | torch.dtype) -> str:
    """bf16, fp16 or fp32. Raises ValueError for any other dtype."""
    name = DTYPES.get(dtype) if isinstance(dtype, torch.dtype) else dtype
    if name not in DTYPES.values():
        raise ValueError(f"dtype must be one of {', '.join(DTYPES.values())}, got {dtype}")
    return str(name)
