"""The plain Triton kernels as peers: what each operation launches, and with which launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

from generator.errors import NormforgeError
from normforge.spec import ceil_div

Results = dict[str, torch.Tensor]
Launch = dict[str, int]
HEAD_COLUMNS = 512
"""Rows that are no longer are heads, of which a program takes several."""
NAMES = (
    "gated_rmsnorm_forward",
    "gated_rmsnorm_backward",
    "rmsnorm_add_forward",
    "rmsnorm_fp8_forward",
    "rmsnorm_fp8_residual_forward",
    "rmsnorm_fp8_backward",
    "rmsnorm_rope_forward",
    "rmsnorm_rope_backward",
    "rope",
)
"""The operations with a plain kernel."""


def launches(name: str, N: int) -> Iterator[Launch]:
    """Yield the launches that are tried: rows of a program, its warps, and, of a backward, the
    programs for each SM."""
    short = N <= HEAD_COLUMNS
    rows = (8, 16, 32, 64) if short else (1,)
    warps = (1, 2, 4, 8) if short else (4, 8, 16)
    for_each_sm = ((2, 4, 8) if short else (1, 2, 4)) if name.endswith("backward") else (0,)
    for B, num_warps, per_sm in product(rows, warps, for_each_sm):
        if 1024 * num_warps * (1 if per_sm else 2) >= B * N or not short:
            yield {"B": B, "num_warps": num_warps, "per_sm": per_sm}


def bind(name: str, inputs: Any, sms: int, launch: Launch) -> Callable[[], Results]:
    """Return a call that makes the outputs by name. Raises NormforgeError for what the kernels do
    not do."""
    if name not in NAMES:
        raise NormforgeError(f"there is no plain kernel of {name}")
    if getattr(inputs, "interleaved", False):
        raise NormforgeError("the plain kernel rotates halves")
    if getattr(inputs, "cos", None) is not None and 2 * inputs.cos.shape[-1] != inputs.x.shape[-1]:
        raise NormforgeError("the plain kernel rotates all columns")
    residual = getattr(inputs, "dresidual", None)
    if residual is not None and residual.dtype != inputs.x.dtype:
        raise NormforgeError("the plain kernel adds residuals of x's dtype")
    knobs = {"B": launch["B"], "num_warps": launch["num_warps"]}
    programs = sms * launch["per_sm"] or ceil_div(len(inputs.x), launch["B"])
    return partial(_run, name, inputs, programs, knobs)


def _run(name: str, i: Any, programs: int, knobs: Launch) -> Results:
    from benchmarks.peers import plain_triton as kernels

    x, (rows, N) = i.x, i.x.shape
    grid, columns = (programs,), kernels.columns_of(x)
    given: tuple[Any, ...]

    def wide(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=x.device)

    def narrow() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(x, dtype=torch.float8_e4m3fn), wide(rows, N // 128)

    def summed(partial: torch.Tensor) -> torch.Tensor:
        return partial.sum(0).to(i.weight.dtype)

    if name == "gated_rmsnorm_forward":
        y = torch.empty_like(x)
        kernels.gated_forward[grid](x, i.z, i.weight, y, rows, i.eps, i.offset, **columns, **knobs)
        return {"y": y}
    if name == "rmsnorm_add_forward":
        y, rstd = torch.empty_like(x), wide(rows)
        given = (x, i.r, i.weight, y, rstd, rows, i.eps, i.offset)
        kernels.add_forward[grid](*given, **columns, **knobs)
        return {"y": y, "rstd": rstd}
    if name == "rmsnorm_fp8_forward":
        (y8, scales), rstd = narrow(), wide(rows)
        given = (x, i.weight, y8, scales, rstd, rows, i.eps, i.offset)
        kernels.fp8_forward[grid](*given, **columns, **knobs)
        return {"y8": y8, "y_scales": scales, "rstd": rstd}
    if name == "rmsnorm_fp8_residual_forward":
        (y8, scales), rstd, h = narrow(), wide(rows), torch.empty_like(x)
        given = (x, i.r, i.weight, h, y8, scales, rstd, rows, i.eps, i.offset)
        kernels.fp8_residual_forward[grid](*given, **columns, **knobs)
        return {"y8": y8, "y_scales": scales, "rstd": rstd, "h": h}
    if name == "rmsnorm_rope_forward":
        y = torch.empty_like(x)
        given = (x, i.weight, i.cos, i.sin, y, rows, i.heads, i.eps, i.offset)
        kernels.rope_forward[grid](*given, N=N, **knobs)
        return {"y": y}
    if name == "rope":
        y = torch.empty_like(x)
        kernels.rope[grid](x, i.cos, i.sin, y, rows, i.heads, i.sign, N=N, **knobs)
        return {"y": y}
    dx, partial = torch.empty_like(x), wide(programs, N)
    if name == "gated_rmsnorm_backward":
        dz = torch.empty_like(x)
        given = (x, i.z, i.dy, i.weight, dx, dz, partial, rows, i.eps, i.offset)
        kernels.gated_backward[grid](*given, **columns, **knobs)
        return {"dx": dx, "dz": dz, "dw": summed(partial)}
    if name == "rmsnorm_fp8_backward":
        dx8, scales = narrow()
        adds = i.dresidual is not None
        given = (x, i.dy, i.rstd, i.weight, i.dresidual if adds else x, dx, dx8, scales)
        kernels.fp8_backward[grid](*given, partial, rows, i.offset, adds, **columns, **knobs)
        return {"dx": dx, "dw": summed(partial), "dx8": dx8, "dx_scales": scales}
    given = (x, i.dy, i.weight, i.cos, i.sin, dx, partial, rows, i.heads, i.eps, i.offset)
    kernels.rope_backward[grid](*given, N=N, **knobs)
    return {"dx": dx, "dw": summed(partial)}
