"""The functions of a package of RMSNorm; frontends/package.py has those of every package."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.compiler import is_dynamo_compiling

from .frontends.dtensor import register_sharding
from .frontends.fused_patch import fuse as fuse_norms
from .frontends.fused_patch import unfuse
from .frontends.gated_patch import log_left
from .frontends.module import RMSNorm
from .frontends.norm_add import NormAndAdd
from .frontends.operators import Operators
from .frontends.package import NormPackage, Shape
from .frontends.patch import patch, unpatch
from .frontends.rms_norm import Norm
from .frontends.sum_backward import SumBackward
from .serve.forward import Forward
from .serve.kernels import Source
from .serve.options import Arguments, Options
from .serve.reference import Results
from .torch_internals import watched


class Package(NormPackage):
    """The functions of a package of RMSNorm, or of those of several GPUs."""

    ops: Operators
    operation = "rmsnorm_backward"
    beside: str = ""
    """The module of the batch-invariant package for the same GPU; "" for the one beside this."""
    gated: str = ""
    """The module with the functions of gated norms, which `patch` serves, too; "" for none."""
    _forward_class: ClassVar[type[Forward]] = Forward
    _norm_class: ClassVar[type[Norm]] = Norm

    def __init__(self, of: Path | Source, name: str = "") -> None:
        super().__init__(of, name)
        self._forward = self._forward_class(self._source)
        self.ops = Operators(self.name, self._forward, self._run, self._quick)
        self.ops.invariant = self._invariant
        self._norm = self._norm_class(self, self._forward, self.ops)
        self.rms_norm = self._norm.rms_norm
        self.rmsnorm_forward = self._norm.rmsnorm_forward
        # A class per package, under a name by which pickle finds it.
        members = {
            "_package_norm": property(lambda _: self._norm),
            "_package_invariant": self._invariant,
            "_invariant_class": staticmethod(self._invariant_class),
            "__doc__": RMSNorm.__doc__,
        }
        self.RMSNorm: type[RMSNorm] = type("RMSNorm", (RMSNorm,), members)

    def add_by(self, source: Callable[[], Source | str]) -> None:
        """Let kernels serve `rms_norm` with `add`. source: finds those of its forward, or says why
        there are none."""
        served = NormAndAdd(source, self._forward)
        self._norm.added = self.ops.norm_and_add = served

    def add_gradients_by(self, sources: Callable[[str], Source | str]) -> None:
        """Let kernels serve the backwards of sums that a pass over a graph finds. sources: by
        operation, finds those, or says why there are none."""
        self.ops.sum_backward = SumBackward(sources)

    def _invariant_class(self) -> type[RMSNorm]:
        """The RMSNorm of the batch-invariant package for the same GPU. Raises RuntimeError."""
        folder, _, module = self.RMSNorm.__module__.rpartition(".")
        prefix = module.removesuffix("rmsnorm_backward")  # an installed export has one
        beside = f"{prefix if prefix != module else ''}rmsnorm_invariant_backward"
        name = self.beside or ".".join(filter(None, (folder, beside)))
        try:
            found: type[RMSNorm] = import_module(name).RMSNorm
        except ImportError as error:
            raise RuntimeError(
                "RMSNorm(batch_invariant=True) needs the package rmsnorm_invariant_backward beside "
                "this one; docs/determinism.md says how to tune it"
            ) from error
        return found

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
        dx_out: torch.Tensor | None = None,
        dw_out: torch.Tensor | None = None,
        accumulate: bool = False,
        dw_dtype: torch.dtype | None = None,
    ) -> Results:
        """The gradients of y = x * rstd * (weight + weight_offset), where rstd = 1 / sqrt(mean(x^2)
        + eps) of each row.

        The results are not differentiable: asking for a gradient through them raises RuntimeError.
        The call runs on the current stream, can be captured into a CUDA graph, and never
        synchronises with the host. Under torch.compile and other tracers it is one operator. CPU
        and meta tensors use the formula in PyTorch. If the package has no kernel for a call, ATen
        serves it where it can, else the formula, with one warning per reason.

        Args:
            dy: (..., N), bf16, fp16 or fp32, in any layout. Contiguous rows with one stride or two
                (the heads of a packed tensor) are read in place, and so is one row repeated by
                `expand`. Other layouts are copied first.
            x: shape and dtype of dy, in any layout.
            rstd: fp32, one value per row, as the forward saved it. rstd of 2^64 or more (possible
                only with eps below 2^-128) makes dx non-finite. `rms_norm` avoids this: below eps =
                2^-96, its backward uses PyTorch's operations.
            weight: (N,) in x's dtype or fp32; (H, N) with x (..., H, N) for one weight per head;
                None for ones.
            weight_offset: a number added to the weight in fp32 (1.0 for models that store w - 1).
            dresidual: a gradient of x from elsewhere (the residual connection), in x's shape and
                any floating dtype. It is added to dx in fp32.
            need_dx: False to skip dx.
            need_dw: False to skip dw.
            dx_out: a contiguous tensor for dx, in x's shape and dtype. It is returned as dx. It may
                be dy itself, which then holds dx instead; it may overlap no other argument. Where
                no kernel may write it, and in compiled code, dx is copied to it.
            dw_out: a tensor for dw, in the weight's dtype or fp32. It is returned as dw. It may
                overlap no other argument, which is not checked.
            accumulate: add dw to dw_out instead of overwriting it, in fp32 and in a fixed order.
            dw_dtype: torch.float32 to get dw without rounding it to the weight's dtype.

        Returns:
            (dx, dw), or (dx, dw, dresidual_out) with dresidual. dx is contiguous, in x's shape and
                dtype, or None. dw has the weight's shape, and its dtype unless dw_dtype or dw_out
                says otherwise; or it is None. dresidual_out is dx in dresidual's dtype; it is dx
                itself if x has the same dtype.

        Raises:
            TypeError, ValueError: if the arguments do not fit together.
            LaunchError: if the driver refuses a launch.
        """
        if (
            weight is not None
            and dresidual is None
            and dx_out is None
            and dw_out is None
            and dw_dtype is None
            and need_dx
            and need_dw
            and not (weight_offset or accumulate)
            and not watched()
        ):
            native = self._native
            if native.backward is not None:
                found = native.backward(dy, x, rstd, weight)
                if found is not None:
                    return found
            results = self._quick(dy, x, rstd, weight)
            if results is not None:
                return results
        given = Arguments(dy, x, rstd, weight, dresidual, dw_out, dx_out=dx_out)
        options = Options(float(weight_offset), need_dx, need_dw, accumulate, dw_dtype)
        return self._serve(given, options)

    def _serve(self, given: Arguments, options: Options) -> Results:
        if not is_dynamo_compiling():
            register_sharding(*self.ops.all)
        return super()._serve(given, options)

    def patch(
        self, model: torch.nn.Module, casting: str | None = None, *, fuse: bool = False
    ) -> list[str]:
        """Serve the norms of a model with norm classes of its own, such as Hugging Face's Llama,
        Qwen and Gemma; and those gated norms, as in Qwen3-Next, that a package of `normforge.gated`
        has kernels for. `unpatch(model)` undoes it.

        Args:
            model: any module, on any device, including the meta device.
            casting: what the norms compute: "torch", "gemma" or "llama" (docs/adopting.md); None to
                detect it.
            fuse: where there are kernels, let `rms_norm_rope` serve attention that normalizes its
                queries and keys and rotates them, as in Qwen 3 and Gemma 3 of Hugging Face, and
                `rms_norm` layers whose norms stand before or behind a sum of the residual stream,
                as in Llama, Mistral and Qwen (before) and in OLMo 2 and Gemma (behind).

        Returns:
            The names of the norms that are now served, and with `fuse` of those modules.
        """
        names = patch(self._norm, model, casting)
        unfuse(model)
        names += fuse_norms(self._norm, self.ops.rotated, model, casting) if fuse else []
        if not self.gated:
            log_left(model, "only normforge.gated.patch serves them beside this package")
            return names
        return names + import_module(self.gated).functions.patch_tuned(model)

    def unpatch(self, model: torch.nn.Module) -> list[str]:
        """Restore the forwards that `patch` replaced. Returns the names of these modules."""
        names = super().unpatch(model) + unfuse(model)
        return names + unpatch(model, "RMSNormGated") if self.gated else names

    def _start_native(self, *machine: Any) -> None:
        self._native.start(self._forward, self._norm.gradients, self.ops, *machine)
        self._forward.native = self._native.forward
        self._forward.learn = self._native.learn_forward

    def _load_forwards(self, shapes: list[Shape], residual: str) -> None:
        for forward in self._norm.forwards():
            forward.warmup(shapes, residual)
