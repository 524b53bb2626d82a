"""Errors of gated RMSNorms against float64, beside those of the models that they stand in for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from normforge import rms_norm_gated
from normforge.operations import GATED_BACKWARDS

MOST = 1.1
"""Times the error of eager code."""
SHAPES = {
    "heads of 64": (96, 4, 64),
    "heads of 128": (48, 4, 128),
    "heads of 256": (24, 4, 256),
    "whole rows": (48, 1024),
}
GROUPS = (64, 128, 256, 1024)


def eager(
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    activation: str,
    norm_before_gate: bool,
    group: int,
) -> torch.Tensor:
    """Compute the norm as transformers does: in fp32, its result in x's dtype times the weight."""
    act = functional.silu if activation == "silu" else torch.sigmoid
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = x.to(wide) if norm_before_gate else x.to(wide) * act(z.to(wide))
    groups = rows.unflatten(-1, (-1, group))
    groups = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)
    y = weight * groups.flatten(-2).to(x.dtype)
    return (y * act(z.to(wide)) if norm_before_gate else y).to(x.dtype)


def results(norm: Any, given: list[torch.Tensor], dy: torch.Tensor, *rest: Any) -> Any:
    given = [one.detach().requires_grad_() for one in given]
    y = norm(*given, 1e-6, *rest)
    return dict(zip(("y", "dx", "dz", "dw"), (y, *torch.autograd.grad(y, given, dy)), strict=True))


def no_worse(given: list[torch.Tensor], *rest: Any) -> None:
    dy = torch.randn(given[0].shape).to(given[0].dtype)
    exact = results(eager, [one.double() for one in given], dy.double(), *rest)
    ours, theirs = results(rms_norm_gated, given, dy, *rest), results(eager, given, dy, *rest)
    for name, wanted in exact.items():
        assert ours[name].dtype == theirs[name].dtype
        for norm in (2, torch.inf):
            error, bar = (
                torch.linalg.vector_norm(found[name].double() - wanted, norm)
                for found in (ours, theirs)
            )
            # Both are off by a few units in the last place in fp32, in one order or another.
            unit = torch.finfo(torch.float32).eps * torch.linalg.vector_norm(wanted, norm)
            assert error <= MOST * bar + unit, (name, norm, error, bar)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", GATED_BACKWARDS)
def test_errors_of_heads_and_rows(kind: tuple[str, bool], shape: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    *_, width = size = SHAPES[shape]
    rows = [torch.randn(size).to(dtype) for _ in range(2)]
    no_worse([*rows, (torch.randn(width) * 0.3 + 1).to(dtype)], *kind, width)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("kind", GATED_BACKWARDS)
def test_errors_of_groups_with_weights_of_their_own(kind: tuple[str, bool], group: int) -> None:
    torch.manual_seed(1)
    given = [torch.randn(32, 1024).bfloat16() for _ in range(2)]
    no_worse([*given, (torch.randn(1024) * 0.3 + 1).bfloat16()], *kind, group)


@pytest.mark.parametrize("kind", GATED_BACKWARDS)
def test_errors_of_a_weight_in_fp32(kind: tuple[str, bool]) -> None:
    """Qwen's returns x's dtype, too; Mamba's is as wide as its weight."""
    torch.manual_seed(2)
    weight = torch.randn(128) * 0.3 + 1

    def narrow(*given: Any) -> torch.Tensor:
        return eager(*given).to(torch.bfloat16)

    given = [torch.randn(96, 128).bfloat16() for _ in range(2)]
    dy = torch.randn(96, 128).bfloat16()
    exact = results(eager, [one.double() for one in (*given, weight)], dy.double(), *kind, 128)
    ours = results(rms_norm_gated, [*given, weight], dy, *kind)
    theirs = results(narrow, [*given, weight], dy, *kind, 128)
    for name, wanted in exact.items():
        error, bar = ((found[name].double() - wanted).norm() for found in (ours, theirs))
        assert ours[name].dtype == theirs[name].dtype
        assert error <= MOST * bar, (name, error, bar)
