"""RMSNorm that is added to a residual stream, y = r + norm(x) * w: the functions of a package of
its forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..operations import RMSNORM_ADD_FORWARD
from ..serve.kernels import source_of
from ..serve.rows import RowServer
from ..torch_internals import float_of, served_dtype

FP32_EPS = torch.finfo(torch.float32).eps


class NormAddPackage:
    """The functions of a package of this forward. Making one compiles nothing and does not touch
    CUDA."""

    operation = RMSNORM_ADD_FORWARD.name

    def __init__(self, of: Path, name: str = "") -> None:
        """Raises ValueError for a damaged package and one of another operation, OSError for
        none."""
        self.folder, self.name = of, name or str(of)
        self._source = source_of(of, self.operation)
        self._server = RowServer(RMSNORM_ADD_FORWARD, self._source)

    @property
    def provenance(self) -> dict[str, Any]:
        """The target, and how the kernel of every tuned shape was found and checked."""
        table = self._source(None).backward
        shapes = {entry.shape: dict(entry.provenance) for entry in table.tuned}
        return {"target": table.target, "shapes": shapes}

    def explain(
        self, M: int, N: int, dtype: str, weight_dtype: str = "", *, offset: bool = False
    ) -> dict[str, Any]:
        """Say which kernel serves M aligned rows of N columns ("bf16", "fp16" or "fp32"), and
        why."""
        return self._server.explain(M, N, dtype, weight_dtype, offset)

    def rmsnorm_forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        eps: float | None = None,
        *,
        add: torch.Tensor,
        weight_offset: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (y, rstd) of y = add + x * rstd * (weight + weight_offset), as `rmsnorm_forward`
        of the packages of RMSNorm does, with `add` in x's shape and dtype. No gradient flows
        through the results."""
        weight, eps = served_dtype(weight, x), float_of(eps)
        given = {"x": x, "r": add, "weight": weight, "eps": FP32_EPS if eps is None else eps}
        found = self._server(given, float(weight_offset))
        return found["y"], found["rstd"]
