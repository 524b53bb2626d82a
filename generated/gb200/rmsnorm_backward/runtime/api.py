"""The functions of an emitted package."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.compiler import is_dynamo_compiling

from .frontends.dtensor import register_sharding
from .frontends.graph_pass import AUTOTUNED, Pass, make_backend, make_pass
from .frontends.install import Installation
from .frontends.module import RMSNorm
from .frontends.operators import SCHEMAS, Operators, digest_of
from .frontends.patch import patch, unpatch
from .frontends.rms_norm import Norm
from .serve.checks import dtype_name
from .serve.describe import DescribedServer
from .serve.forward import Forward
from .serve.options import Arguments, Options
from .serve.reference import Results
from .table import Kernel
from .torch_internals import modes_active, raw_stream, tangents_active


class Package(DescribedServer):
    """One emitted package: its table, and its kernels as they get loaded.

    Reading it compiles nothing and does not touch CUDA. Safe to use from several threads.
    """

    _forward_class: ClassVar[type[Forward]] = Forward
    _invariant: ClassVar[bool] = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._forward = self._forward_class(folder)
        self.ops = Operators(digest_of(folder, SCHEMAS), self._forward, self._run, self._quick)
        self._norm = Norm(self, self._forward, self.ops)
        self.rms_norm = self._norm.rms_norm
        self.rmsnorm_forward = self._norm.rmsnorm_forward
        # A class of its own, which a package gives the name by which pickle finds it.
        members = {"_package_norm": self._norm, "_package_invariant": self._invariant}
        members["__doc__"] = RMSNorm.__doc__
        self.RMSNorm: type[RMSNorm] = type("RMSNorm", (RMSNorm,), members)
        register_sharding(self.ops)
        installation = Installation(self._quick, self._route, "CUDA", folder)
        self.install = installation.install
        self.uninstall = installation.uninstall
        self.installed = installation.installed

    def rmsnorm_backward(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        rstd: torch.Tensor,
        weight: torch.Tensor | None = None,
        *,
        weight_offset: float = 0.0,
        dresidual: torch.Tensor | None = None,
        need_dx: bool = True,
        need_dw: bool = True,
        dw_out: torch.Tensor | None = None,
        accumulate: bool = False,
        dw_dtype: torch.dtype | None = None,
    ) -> Results:
        """The gradients of y = x * rstd * (weight + weight_offset), where rstd = 1 / sqrt(mean(x^2)
        + eps) of each row.

        No gradient flows through the results: with create_graph=True, or where dy or x wants one
        otherwise, asking for it raises RuntimeError. Everything runs on the current stream, may be
        captured into a CUDA graph and never waits. Under torch.compile and other tracers it becomes
        one operator. CPU and meta tensors are served by the formula in PyTorch; what has no kernel
        here by ATen where it can, else by the formula, with one warning per reason.

        Args:
            dy: (..., N), bf16, fp16 or fp32, in any layout. Read in place: contiguous rows at one
                stride, or at two (the heads of a packed tensor), and one row repeated by `expand`.
                Others are copied first.
            x: as dy, of its shape and dtype.
            rstd: fp32, one value per row, as the forward saved it.
            weight: (N,) of x's dtype or fp32; (H, N) with x (..., H, N) for a weight per head; None
                for ones.
            weight_offset: a number added to the weight in fp32 (1.0 for models that store w - 1).
            dresidual: the gradient that reaches x past the norm, of x's shape and any floating
                dtype. It is added to dx in fp32.
            need_dx: False to leave out dx.
            need_dw: False to leave out dw.
            dw_out: where dw goes, of the weight's dtype or fp32; it is the dw returned.
            accumulate: add dw to dw_out instead, in fp32 and in the same fixed order.
            dw_dtype: torch.float32 for dw before its rounding to the weight's dtype.

        Returns:
            (dx, dw), and with dresidual (dx, dw, dresidual_out). dx is contiguous, of x's shape and
                dtype, or None. dw is of the weight's shape and dtype, or None. dresidual_out is dx
                in dresidual's dtype, and dx itself when that is x's.

        Raises:
            TypeError, ValueError: for arguments that do not fit.
            LaunchError: when the driver refuses a launch.
        """
        if (
            weight is not None
            and dresidual is None
            and dw_out is None
            and dw_dtype is None
            and need_dx
            and need_dw
            and not (weight_offset or accumulate)
            and not (is_dynamo_compiling() or modes_active() or tangents_active())
        ):
            native = self._native
            if native.backward is not None:
                found = native.backward(dy, x, rstd, weight)
                if found is not None:
                    return found
            results = self._quick(dy, x, rstd, weight)
            if results is not None:
                return results
        given = Arguments(dy, x, rstd, weight, dresidual, dw_out)
        options = Options(float(weight_offset), need_dx, need_dw, accumulate, dw_dtype)
        return self._serve(given, options)

    def _serve(self, given: Arguments, options: Options) -> Results:
        """Any call: through an operator where somebody watches those, else at once."""
        if not is_dynamo_compiling():
            register_sharding(self.ops)
        return self.ops.serve(self._run, given, options)

    def graph_pass(
        self, how: str = "route", inductor_configs: Mapping[str, Any] | None = AUTOTUNED
    ) -> Pass:
        """A pass over traced training graphs, for graph trainers.

        Args:
            how: `route` gives every RMSNorm to this package; `tag` marks it for
                torch.fx.passes.regional_inductor.
            inductor_configs: settings of torch._inductor.config for `tag`. By default Inductor
                searches for the fastest; None leaves the settings as they are.

        Returns:
            A function that takes a torch.fx.GraphModule, and example inputs perhaps, and returns
                it.
        """
        return make_pass(self.ops, how, inductor_configs)

    def inductor_backend(self, **inductor_configs: Any) -> Callable[..., Any]:
        """A backend for torch.compile: Inductor, but every torch.nn.RMSNorm is this package's."""
        return make_backend(self.ops, **inductor_configs)

    def patch(self, model: torch.nn.Module, casting: str | None = None) -> list[str]:
        """Serve the norms of a model that has classes of its own for them, as Hugging Face's Llama,
        Qwen and Gemma have. `unpatch(model)` takes it back.

        Args:
            model: any module, on any device, the meta device too.
            casting: "torch", "gemma" or "llama" says what the norms compute; None finds it out.

        Returns:
            The names of the norms that are served now.
        """
        return patch(self._norm, model, casting)

    def unpatch(self, model: torch.nn.Module) -> list[str]:
        """Give the norms that `patch` changed their own forward back; returns their names."""
        return unpatch(model)

    def use_native(self) -> None:
        """Serve plain training steps in C++ from now on: same kernels, same bits, less host time in
        the forward and the backward of `rms_norm` and `RMSNorm`, and in the operators that compiled
        code calls. None of these needs Python then, in autograd's thread either.

        Compiles three small files once per machine, PyTorch and Python, into TORCH_EXTENSIONS_DIR
        (default: ~/.cache/torch_extensions); later processes load what is there. Needs a C++
        compiler ($CXX, c++, g++ or clang++), Python's headers and PyTorch with CUDA. Everything
        but plain calls (a weight, dense and aligned tensors, outside a capture; of a backward both
        gradients and no option) goes the same way as before, and so do the first two calls of
        every shape, and the first on another stream. Takes one more block of scratch per stream,
        which a later `warmup` reserves. Call it before or after models are built, from any thread,
        as often as you like; it stays on. Several processes may call it at once.

        Raises RuntimeError, which says what is missing; everything then works as before.
        """
        self._native.start(self._forward, self._norm.gradients, self.ops.namespace)

    def warmup(
        self,
        shapes: Iterable[tuple[Any, ...]],
        device: torch.device | int | None = None,
        *,
        offset: bool = False,
        residual: str | torch.dtype | None = None,
    ) -> None:
        """Load the kernels of some shapes, forward and backward, and reserve the workspace of the
        current stream, so that no later call pays for either.

        Args:
            shapes: (M, N, dtype) or (M, N, dtype, weight dtype) each, dtypes as in `explain`. No
                rows (M = 0) need nothing. Shapes that no kernel serves are left to the call.
            device: the CUDA device; by default the current one.
            offset: for calls with a weight_offset. Where no kernel has the option itself, what the
                call is composed of is loaded.
            residual: for calls with a residual stream (a dresidual) of that dtype, as in `explain`.

        Raises:
            ValueError: for a shape or dtype that there cannot be.
            RuntimeError: without a CUDA device.
            LaunchError: when the driver refuses.
        """
        named = [_named(shape) for shape in shapes]
        option = "" if residual is None else dtype_name(residual)
        if not torch.cuda.is_available():
            raise RuntimeError("warmup needs a CUDA device, and PyTorch finds none")
        named = [shape for shape in named if shape[0] > 0]
        with torch.cuda.device(device):
            self._forward.warmup(named, option)
            index = torch.cuda.current_device()
            stream = raw_stream(index)
            workspace = self._workspaces.of_stream(index, stream)
            for shape in named:
                kernel = self._kernel_for(index, shape, offset, option)
                if kernel is None:
                    continue
                self._kernels.get(kernel).load(index)
                plan = self._launch(kernel.spec, shape[0])
                with workspace.lock:
                    workspace.fit(plan)
                if self._native.reserve is not None and not (offset or residual):
                    self._native.reserve(index, stream, plan)

    def _kernel_for(
        self, device: int, shape: tuple[int, int, str, str], offset: bool, residual: str
    ) -> Kernel | None:
        """The kernel that a call with these options ends at, however it is composed."""
        kernel = self._best(device, shape, offset, residual).kernel
        if offset and not (kernel and kernel.spec.offset):
            # An fp32 weight takes the offset; a residual that this kernel lacks is added before.
            left = kernel.spec.residual if kernel else ""
            return self._kernel_for(device, (*shape[:3], "fp32"), False, left)
        return kernel


def _named(shape: tuple[Any, ...]) -> tuple[int, int, str, str]:
    """A shape of `warmup` with the names of both dtypes. Raises ValueError."""
    sized = isinstance(shape, (tuple, list)) and len(shape) in (3, 4)
    if not sized or not all(isinstance(size, int) for size in shape[:2]):
        raise ValueError(f"a shape is a tuple like (4096, 8192, 'bf16'), got {shape!r}")
    M, N, dtype, weight_dtype = (*shape, None)[:4]
    name = dtype_name(dtype)
    if M < 0 or N < 1:
        raise ValueError(f"M must be at least 0 and N at least 1, got M={M} and N={N}")
    return M, N, name, name if weight_dtype is None else dtype_name(weight_dtype)
