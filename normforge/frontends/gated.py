"""Gated RMSNorms: the functions of a package of them or their backward, or of those of all GPUs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from pickle import PicklingError
from typing import Any, ClassVar

import torch

from ..operations import GATED, GATED_BACKWARDS, GATED_FORWARDS
from ..serve.kernels import Source
from ..serve.options import SMALLEST_EPS
from ..torch_internals import float_of, served_dtype
from .gated_checks import check_gated, kind_of
from .gated_module import RMSNormGated
from .gated_node import SERVED, Gradients, formula, gated_norm, gradients_by_formula
from .gated_patch import forward_that_serves, is_gated
from .library import Served
from .package import _package_of
from .patch import REMADE, is_served, original_forward, replace_forwards, unpatch
from .row_functions import OneOperation, RowFunctions
from .tried import eps_of

_LAYER = "RMSNormGated"


class GatedFunctions(RowFunctions):
    """The functions of gated RMSNorms. Safe to use from several threads."""

    served: ClassVar[Served[Any]] = SERVED

    def __init__(self, sources: Callable[[str], Source | str], name: str) -> None:
        """sources, name: as of RowFunctions."""
        super().__init__(sources, name)
        # A class per package, under a name by which pickle finds it.
        members = {"_package": property(lambda _: self), "__doc__": RMSNormGated.__doc__}
        self.RMSNormGated: type[RMSNormGated] = type("RMSNormGated", (RMSNormGated,), members)
        self._forwards: dict[Any, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a reference to the module, so that patched models can be pickled. Raises
        PicklingError where no module has these functions."""
        module = self.RMSNormGated.__module__
        if _package_of(module) is not self:
            raise PicklingError(f"no module has the functions of {self.name}")
        return _package_of, (module,)

    def explain(
        self,
        M: int,
        N: int,
        dtype: str | torch.dtype,
        weight_dtype: str | torch.dtype = "",
        activation: str = "silu",
        norm_before_gate: bool = True,
        *,
        forward: bool = False,
    ) -> dict[str, Any]:
        """Say which kernel serves the backward (or the forward) of M aligned rows of N columns
        ("bf16", "fp16" or "fp32"), and why."""
        operations = GATED_FORWARDS if forward else GATED_BACKWARDS
        server = self.server(operations[kind_of(activation, norm_before_gate)])
        return server.explain(M, N, dtype, weight_dtype)

    def rms_norm_gated(
        self,
        x: torch.Tensor,
        z: torch.Tensor,
        weight: torch.Tensor | None = None,
        eps: float = 1e-6,
        activation: str = "silu",
        norm_before_gate: bool = True,
        group_size: int | None = None,
    ) -> torch.Tensor:
        """Compute y = norm(x) * weight * act(z), or norm(x * act(z)) * weight, differentiable in x,
        z and weight.

        Both directions are kernels where such were tuned, else the formula in PyTorch. Under
        torch.compile the forward is PyTorch's operators, which it fuses with what is around them.
        Works under autocast (which changes nothing here), activation checkpointing and CUDA graphs.
        Second derivatives, torch.func and tensor subclasses use PyTorch's operators.

        Args:
            x: (..., D), bf16, fp16 or fp32.
            z: the gate, in x's shape and dtype.
            weight: (D,), or (group_size,) for all groups, or None for ones. Its gradient has its
                dtype.
            eps: added to the mean square. Below 2^-96 the backward is PyTorch's operators.
            activation: "silu" (or "swish") or "sigmoid".
            norm_before_gate: whether the norm is that of x (as in Qwen3-Next) or of x * act(z) (as
                in Mamba 2).
            group_size: columns that are normalized together, None for all.

        Returns:
            y in x's shape and dtype, computed in fp32 and rounded once.

        Raises:
            TypeError, ValueError: if the arguments do not fit together.
        """
        kind, eps = kind_of(activation, norm_before_gate), float_of(eps)
        check_gated(x, z, weight, eps, group_size)
        weight = served_dtype(weight, x)
        if group_size is None or group_size == x.shape[-1]:
            return gated_norm(x, z, weight, eps, kind, self.name)
        rows, gates = (given.unflatten(-1, (-1, group_size)) for given in (x, z))
        if weight is not None and weight.shape[0] == x.shape[-1]:
            weight = weight.unflatten(0, (-1, group_size))
        return gated_norm(rows, gates, weight, eps, kind, self.name).flatten(-2)

    def forward(
        self,
        x: torch.Tensor,
        z: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        kind: tuple[str, bool],
    ) -> torch.Tensor:
        """Return y, without gradients. weight: as in `backward`."""
        server = self.server(GATED_FORWARDS[kind])
        if server.is_without_kernels(x):
            server.count(x, weight)
            return formula(x, z, weight, eps, kind)
        if weight is not None and weight.dim() == 2:
            groups = zip(x.unbind(-2), z.unbind(-2), weight, strict=True)
            return torch.stack([self.forward(*group, eps, kind) for group in groups], -2)
        return server({"x": x, "z": z, "weight": weight, "eps": eps})["y"]

    def backward(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        z: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        kind: tuple[str, bool],
    ) -> Gradients:
        """Return dx, dz and dw. weight: (N,), or (H, N) with rows (..., H, N), whose groups kernels
        serve one by one."""
        server = self.server(GATED_BACKWARDS[kind])
        served = eps >= SMALLEST_EPS
        if served and server.is_without_kernels(x):
            server.count(x, weight)
            served = False
        if not served:
            with torch.no_grad():
                return gradients_by_formula(dy, x, z, weight, eps, kind)
        if weight is not None and weight.dim() == 2:
            groups = zip(dy.unbind(-2), x.unbind(-2), z.unbind(-2), weight, strict=True)
            dx, dz, dw = zip(*(self.backward(*group, eps, kind) for group in groups), strict=True)
            return torch.stack(dx, -2), torch.stack(dz, -2), torch.stack(dw)
        found = server({"x": x, "z": z, "dy": dy, "weight": weight, "eps": eps})
        return found["dx"], found["dz"], None if weight is None else found["dw"]

    def serves(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        kind: tuple[str, bool],
        trains: bool,
    ) -> bool:
        """Return True if there are kernels for rows like x, which may be a fake of sizes that
        tracing does not know. trains: backwards, too."""
        directions = (GATED_FORWARDS[kind], GATED_BACKWARDS[kind])[: 1 + trains]
        return self.have_kernels(x, weight, directions)

    def patch(self, model: torch.nn.Module) -> list[str]:
        """Serve the gated RMSNorms of a model, such as those of Qwen3-Next and Mamba 2. Returns
        their names; `unpatch(model)` undoes it.

        Each is tried on a few rows on the CPU, and left alone if it computes something else. The
        log says why (level INFO), and warns if no norm is served. Where a module rounds the
        normalized rows to x's dtype, there is one rounding less. Those of mamba_ssm and
        Flash-Linear-Attention, which run on GPUs alone, are known by their classes. A call without
        a gate, with one of another shape or dtype than x, or with a residual is the module's own.
        """

        def forward_for(module: Any) -> Any:
            return forward_that_serves(module, self._forward_of)

        return replace_forwards(model, _LAYER, forward_for, is_gated)

    def patch_tuned(self, model: torch.nn.Module) -> list[str]:
        """Patch those norms alone that there are kernels for; all in a model that `patch` was
        called for. It does not warn if there are none."""
        if not any(map(is_gated, model.modules())):
            return []
        if any(is_served(module, _LAYER) for module in model.modules()):
            return self.patch(model)

        def forward_of(kind: tuple[str, bool], group_size: int, wide: bool) -> Any:
            missing = self.server(GATED_BACKWARDS[kind]).missing
            if missing:
                return f"{missing}, so that normforge.gated.patch alone serves it"
            return self._forward_of(kind, group_size, wide)

        def forward_for(module: Any) -> Any:
            return forward_that_serves(module, forward_of)

        return replace_forwards(model, _LAYER, forward_for, is_gated, quiet=True)

    def unpatch(self, model: torch.nn.Module) -> list[str]:
        """Restore the forwards that `patch` replaced. Returns the names of these norms."""
        return unpatch(model, _LAYER)

    def _forward_of(self, kind: tuple[str, bool], group_size: int, wide: bool) -> Any:
        """The forward of modules that compute this. One object, so that all that are alike share
        one class."""
        key = (kind, group_size, wide)
        if key not in self._forwards:

            def forward(module: Any, x: torch.Tensor, z: Any, *others: Any) -> Any:
                like = z is not None and (z.shape, z.dtype) == (x.shape, x.dtype)
                if not like or any(one is not None and one is not False for one in others):
                    return original_forward(module, x, z, *others)
                out = torch.promote_types(x.dtype, module.weight.dtype) if wide else x.dtype
                given = (x.to(out), z.to(out), module.weight)
                eps: Any = eps_of(module)
                return self.rms_norm_gated(*given, eps, *kind, group_size)

            setattr(forward, REMADE, partial(self._forward_of, *key))
            self._forwards[key] = forward
        return self._forwards[key]


class GatedPackage(GatedFunctions):
    """The functions of a package of one gated RMSNorm, or of the backward of one. Other operations
    are PyTorch's operators in it. Making one compiles nothing and does not touch CUDA."""

    def __init__(self, of: Path, name: str = "") -> None:
        """Raises ValueError for a damaged package and one of another operation, OSError for
        none."""
        self._kernels = OneOperation(of, GATED, "a gated RMSNorm, nor of its backward")
        super().__init__(self._kernels.source_for(name or str(of)), name or str(of))

    @property
    def provenance(self) -> dict[str, Any]:
        """The target, and how the kernel of every tuned shape was found and checked."""
        return self._kernels.provenance
