"""The functions that the packages of all norms have: `install()`, graphs, and what they know about
themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from pickle import PicklingError
from typing import Any, ClassVar

import torch

from ..serve.checks import dtype_name, explained
from ..serve.kernels import Source, source_of
from ..serve.options import Arguments, Options
from ..serve.reference import Results
from ..serve.server import Server
from ..table import Kernel
from ..torch_internals import raw_stream
from .graph_pass import AUTOTUNED, Pass, make_backend, make_pass
from .install import RMS_NORM, Installation, Routed
from .library import namespace
from .operators import NormOperators
from .patch import unpatch

Shape = tuple[int, int, str, str]
"""M, N, and the names of both dtypes."""


class NormPackage(Server):
    """The functions of a package, or of those of several GPUs, of which each serves its own.

    Making one compiles nothing and does not touch CUDA. Safe to use from several threads.
    """

    ops: NormOperators
    _layer: ClassVar[str] = "RMSNorm"
    _routed: ClassVar[Routed] = RMS_NORM
    """PyTorch's operator that `install` routes."""

    def __init__(self, of: Path | Source, name: str = "") -> None:
        """of: the folder of the package, or where the kernels of several are. name: by which the
        operators know it; by default the folder's. Raises ValueError for a damaged table and one
        of another operation, OSError for none."""
        super().__init__(of if callable(of) else source_of(of, self.operation))
        self.name = name if callable(of) else name or str(of)
        whose = (type(self).__name__, self.name if callable(of) else str(of))
        installation = Installation(self._quick, self._route, "CUDA", whose, self._routed)
        self._installation = installation
        installation.of = self
        self.install = installation.install
        self.uninstall = installation.uninstall
        self.installed = installation.installed

    def __deepcopy__(self, _: Any) -> NormPackage:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a reference to the module, so that functions, and what keeps one, can be pickled.
        Raises PicklingError where no module has them."""
        module = getattr(self, self._layer).__module__
        if _package_of(module) is not self:
            raise PicklingError(f"no module has the functions of {self.name or self.folder}")
        return _package_of, (module,)

    @property
    def folder(self) -> Path:
        """The folder of the package for the GPU that this process uses."""
        return self._source(None).folder

    def _serve(self, given: Arguments, options: Options) -> Results:
        """Serve any call: through an operator if a mode or a tracer is active, else directly."""
        return self.ops.serve(self._run, given, options)

    def graph_pass(
        self, how: str = "route", inductor_configs: Mapping[str, Any] | None = AUTOTUNED
    ) -> Pass:
        """A pass over traced training graphs, for graph trainers.

        Args:
            how: `route` replaces every norm by this package's (only its backward, if the package
                has no forward), and folds additions of a residual stream into it; `tag` marks it
                for torch.fx.passes.regional_inductor.
            inductor_configs: settings of torch._inductor.config for `tag`. By default Inductor
                autotunes; None keeps the current settings.

        Returns:
            A function that takes a torch.fx.GraphModule, and optionally example inputs, and returns
                the graph module.
        """
        return make_pass(self.ops, how, inductor_configs)

    def inductor_backend(self, **inductor_configs: Any) -> Callable[..., Any]:
        """A backend for torch.compile: Inductor, with PyTorch's norms of this package's kind, and
        RMSNorms that a model writes out, served by this package. Of norms with a mean, it serves
        the backward alone.
        inductor_configs: settings of torch._inductor.config, which override those that
        torch.compile's `mode` and `options` name."""
        return make_backend(self.ops, **inductor_configs)

    def unpatch(self, model: torch.nn.Module) -> list[str]:
        """Restore the forwards that `patch` replaced. Returns the names of these norms."""
        return unpatch(model, self._layer)

    @property
    def operators(self) -> Any:
        """The operators, as torch.compile and policies of selective checkpointing see them:
        `operators.rms_norm.v2` and so on. All packages share them; their last argument says which
        one serves a call."""
        return getattr(torch.ops, namespace)

    @property
    def provenance(self) -> dict[str, Any]:
        """The target, and how the kernel of every tuned shape was found and checked."""
        table = self.table
        shapes = {
            entry.shape: {
                **entry.provenance,
                "kernel": entry.kernel.file,
                "determinism": entry.kernel.spec.determinism,
                "evidence": entry.evidence,
            }
            for entry in table.tuned
        }
        return {"target": table.target, "shapes": shapes}

    def explain(
        self,
        M: int,
        N: int,
        dtype: str | torch.dtype,
        weight_dtype: str | torch.dtype | None = None,
        *,
        offset: bool = False,
        residual: str | torch.dtype | None = None,
    ) -> dict[str, Any]:
        """Say which kernel serves M contiguous, aligned rows of N columns on this package's GPU,
        and why. Needs no GPU.

        Args:
            M: rows, at least 1.
            N: columns, at least 1.
            dtype: a torch dtype, or "bf16", "fp16" or "fp32".
            weight_dtype: likewise; by default that of x.
            offset: ask for a kernel that itself adds a weight_offset.
            residual: ask for a kernel that itself adds a dresidual of this dtype. If there is none
                (`how` is "none"), a call adds the option around a plain kernel.

        Returns:
            A dict with shape, gpu, how ("tuned", "nearest", "fallback" or "none") and reason. If
                there is a kernel, also kernel, source (None for a fallback), strategy, determinism
                (its class), evidence and launch. If it was tuned, also tuned_shape and provenance
                (time, tied configs, checks passed, study, date and so on).

        Raises:
            ValueError: for an impossible shape or dtype.
        """
        name, weight_name = explained(M, N, dtype, weight_dtype)
        option = "" if residual is None else dtype_name(residual)
        kernels = self._source(None)
        choice = kernels.backward.choose(M, N, name, weight_name, offset=offset, residual=option)
        facts: dict[str, Any] = {
            "shape": {"M": M, "N": N, "dtype": name, "weight_dtype": weight_name},
            "gpu": kernels.backward.target["title"],
            "how": choice.how,
            "reason": choice.reason,
        }
        if choice.kernel is None:
            return facts
        spec = choice.kernel.spec
        launch = self._launch(spec, M)
        facts |= {
            "kernel": choice.kernel.file,
            "source": str(kernels.folder / "kernels" / f"{choice.kernel.file}.cu")
            if choice.tuned
            else None,
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

    def use_native(self) -> None:
        """Launch plain training steps from C++ from now on, with the same kernels and bits: the
        forward and backward of the norm's function and module, the operators that compiled code
        calls, and PyTorch's backward after `install()`. None of these then needs Python, not even
        in autograd's thread.

        Loads the extension of the wheel where that has one for this PyTorch and Python. Otherwise
        compiles four small files into TORCH_EXTENSIONS_DIR (default: ~/.cache/torch_extensions),
        once per machine and version of both, for which it needs a C++ compiler ($CXX, c++, g++ or
        clang++) and Python's headers. Either way it needs PyTorch with CUDA. A call is plain if it
        has a weight and dense, aligned tensors, and is not captured into a CUDA graph; a plain
        backward computes all gradients without options. All other calls work as before, and so do
        the first two calls of every shape, and the first on another stream. Uses one more block of
        scratch per stream, which a later `warmup` reserves. Call it before or after models are
        built, from any thread and any number of times; it stays on. Several processes may call it
        at once.

        Raises RuntimeError if something is missing, and says what. Everything then works as before.
        """
        self._start_native()
        assert self._native.take is not None
        self._installation.use_native(self._native.take)

    def _start_native(self, *machine: Any) -> None:
        """Turn the native path on. machine: the last arguments of `Native.start`."""
        raise NotImplementedError

    def warmup(
        self,
        shapes: Iterable[tuple[Any, ...]],
        device: torch.device | int | None = None,
        *,
        offset: bool = False,
        residual: str | torch.dtype | None = None,
    ) -> None:
        """Load the forward and backward kernels of some shapes, and reserve the workspace of the
        current stream, so that no later call has to.

        Args:
            shapes: each (M, N, dtype) or (M, N, dtype, weight dtype), with dtypes as in `explain`.
                Shapes without rows (M = 0) or without a kernel are skipped.
            device: the CUDA device; by default the current one.
            offset: for calls with a weight_offset. If no kernel has this option itself, the kernels
                that such a call is composed of are loaded.
            residual: for calls with a residual stream (a dresidual) of that dtype, as in `explain`.

        Raises:
            ValueError: for an impossible shape or dtype.
            RuntimeError: without a CUDA device.
            LaunchError: if the driver refuses.
        """
        named = [_named(shape) for shape in shapes]
        option = "" if residual is None else dtype_name(residual)
        if not torch.cuda.is_available():
            raise RuntimeError("warmup needs a CUDA device, and PyTorch finds none")
        named = [shape for shape in named if shape[0] > 0]
        with torch.cuda.device(device):
            torch.empty(1, device="cuda")  # the context exists from here on
            self._load_forwards(named, option)
            index = torch.cuda.current_device()
            stream = raw_stream(index)
            workspace = self._workspaces.of_stream(index, stream)
            for shape in named:
                kernel = self._kernel_for(index, shape, offset, option)
                if kernel is None:
                    continue
                self._source(index).loaded.get(kernel).load(index)
                plan = self._launch(kernel.spec, shape[0])
                with workspace.lock:
                    workspace.fit(plan)
                if self._native.reserve is not None and not (offset or residual):
                    self._native.reserve(index, stream, plan)

    def _load_forwards(self, shapes: list[Shape], residual: str) -> None:
        """Load the kernels of forwards, on the current device."""
        raise NotImplementedError

    def _kernel_for(self, device: int, shape: Shape, offset: bool, residual: str) -> Kernel | None:
        """The kernel that serves a call with these options, directly or in a composition."""
        kernel = self._best(device, shape, offset, residual).kernel
        if offset and not (kernel and kernel.spec.offset):
            # An fp32 weight takes the offset; a residual that this kernel lacks is added before.
            left = kernel.spec.residual if kernel else ""
            return self._kernel_for(device, (*shape[:3], "fp32"), False, left)
        return kernel


def _named(shape: tuple[Any, ...]) -> Shape:
    """A shape of `warmup` with the names of both dtypes. Raises ValueError."""
    sized = isinstance(shape, (tuple, list)) and len(shape) in (3, 4)
    if not sized or not all(isinstance(size, int) for size in shape[:2]):
        raise ValueError(f"a shape is a tuple like (4096, 8192, 'bf16'), got {shape!r}")
    M, N, dtype, weight_dtype = (*shape, None)[:4]
    name = dtype_name(dtype)
    if M < 0 or N < 1:
        raise ValueError(f"M must be at least 0 and N at least 1, got M={M} and N={N}")
    return M, N, name, name if weight_dtype is None else dtype_name(weight_dtype)


def _package_of(module: str) -> Any:
    """Return the package whose functions a module has; None for a module without."""
    return getattr(getattr(import_module(module), "explain", None), "__self__", None)
