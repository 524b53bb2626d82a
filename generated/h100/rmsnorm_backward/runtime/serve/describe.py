"""What a package knows about itself: its target, and which kernel serves a shape."""

from __future__ import annotations

from typing import Any

import torch

from .checks import dtype_name
from .server import Server


class DescribedServer(Server):
    """A server that explains its choices, also without a GPU."""

    @property
    def provenance(self) -> dict[str, Any]:
        """The target, and how the kernel of every tuned shape was found and checked."""
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
        """Which kernel serves M contiguous, aligned rows of N columns on this package's GPU, and
        why. Needs no GPU.

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
        name = dtype_name(dtype)
        weight_name = name if weight_dtype is None else dtype_name(weight_dtype)
        if M < 1 or N < 1:
            raise ValueError(f"M and N must be at least 1, got M={M} and N={N}")
        option = "" if residual is None else dtype_name(residual)
        choice = self.table.choose(M, N, name, weight_name, offset=offset, residual=option)
        facts: dict[str, Any] = {
            "shape": {"M": M, "N": N, "dtype": name, "weight_dtype": weight_name},
            "gpu": self.table.target["title"],
            "how": choice.how,
            "reason": choice.reason,
        }
        if choice.kernel is None:
            return facts
        spec = choice.kernel.spec
        launch = self._launch(spec, M)
        facts |= {
            "kernel": choice.kernel.file,
            "source": str(self.folder / "kernels" / f"{choice.kernel.file}.cu")
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
