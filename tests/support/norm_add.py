"""A stand-in on the CPU for kernels of `rms_norm` with `add`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from normforge.api import Package
from normforge.frontends.norm_add import NormAndAdd
from normforge.operations import RMSNORM_ADD_FORWARD
from normforge.operations.formula import evaluate


class Kernels:
    """Stand in for a package of the operation: its formula, rounded once, on the CPU. calls: the
    offsets of those that it served; asked: whether a graph's norms had one, for which a kernel was
    wanted; why: what it says where it serves none."""

    def __init__(self, package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[float] = []
        self.why = ""
        self.asked: list[bool] = []
        package.add_by(lambda: "there is no package")
        served = package._norm.added
        assert served is not None
        monkeypatch.setattr(NormAndAdd, "serves", self.serves)
        monkeypatch.setattr(
            NormAndAdd, "may_serve", lambda _, x: x.dtype != torch.float64 and x.numel() > 0
        )
        monkeypatch.setattr(served.server, "by_kernel", self.serve)

    def serves(self, x: torch.Tensor, weight: torch.Tensor | None, offset: bool) -> bool:
        """Say what a pass over a graph is told."""
        self.asked.append(offset)
        return not self.why

    def serve(self, given: dict[str, Any], offset: float) -> dict[str, torch.Tensor] | str:
        if self.why:
            return self.why
        self.calls.append(offset)
        with torch.no_grad():
            found = evaluate(RMSNORM_ADD_FORWARD, given, offset=offset)
        return {"y": found["y"].to(given["x"].dtype), "rstd": found["rstd"]}
