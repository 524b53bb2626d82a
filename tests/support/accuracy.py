"""Errors of a backward and of PyTorch against float64, for random shapes and options.

The error of a result is the root mean square over its elements, each relative to what was summed
for it (`scales`), over several draws of a case, so that one lucky rounding does not decide.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, log2, sqrt
from typing import Any

import torch
from hypothesis import strategies as st

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
RESULTS = ("dx", "dw", "dresidual_out")
MARGIN = 1.1
UNIT = 2**-24
"""Half of the last place of fp32, in which everybody computes."""
DX_UNITS, FEW_COLUMNS = 0.8, 0.4
DW_UNITS, DW_IN_A_ROW = 0.6, 0.31
"""Units that fp32 may cost where PyTorch is lucky: in dx, and more by how few columns there are; in
dw for the term and for each level of a tree of additions, and for each of so many additions one
after another (both by the root of their number). Rendered kernels in the emulator, over 1000
elements and more: dx has 0.86 with 8 columns and more, 1.13 with one; dw had 3.80 where 132
partial sums of 16 rows were added in a row."""
CHAIN = 40
"""Additions in a row of the kernels of a package: blocks of rows, blocks, teams and lanes."""
LUCK = 3
"""Standard deviations, by which n elements may differ from PyTorch's: about 1 / sqrt(n) each."""
ENOUGH, MOST = 4096, 16
"""Elements of dw to draw, and draws."""


@dataclass(frozen=True)
class Case:
    """One call. offset: of the weight; residual: dtype of dresidual, "" for none."""

    M: int
    N: int
    dtype: str
    wide_weight: bool
    has_weight: bool
    offset: float
    residual: str
    seed: int

    def tensors(self, device: str = "cpu") -> dict[str, Any]:
        generator = torch.Generator().manual_seed(self.seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        dtype = DTYPES[self.dtype]
        x, dy = (draw(self.M, self.N).to(dtype) for _ in range(2))
        weight = None
        if self.has_weight:
            weight = 1 - self.offset + 0.1 * draw(self.N)
            weight = weight.to(torch.float32 if self.wide_weight else dtype)
        residual = draw(self.M, self.N).to(DTYPES[self.residual]) if self.residual else None
        rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        found = {"dy": dy, "x": x, "rstd": rstd, "weight": weight, "dresidual": residual}
        return {k: None if v is None else v.to(device) for k, v in found.items()}


def cases(most_rows: int = 300, most_columns: int = 1500) -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        M=st.integers(1, most_rows),
        N=st.one_of(st.integers(1, most_columns), st.sampled_from([64, 128, 256, 1024])),
        dtype=st.sampled_from(sorted(DTYPES)),
        wide_weight=st.booleans(),
        has_weight=st.booleans(),
        offset=st.sampled_from([0.0, 1.0]),
        residual=st.sampled_from(["", "bf16", "fp32"]),
        seed=st.integers(0, 1 << 16),
    )


def exact(t: dict[str, Any], offset: float) -> list[torch.Tensor]:
    """Return dx and dw in float64, of the rstd that was given."""
    dy, x, rstd = (t[name].double() for name in ("dy", "x", "rstd"))
    xhat = x * rstd
    scale = offset + (1.0 if t["weight"] is None else t["weight"].double())
    g = dy * scale
    dx = rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True))
    if t["dresidual"] is not None:
        dx = dx + t["dresidual"].double()
    return [dx, (dy * xhat).sum(0)]


def composite(t: dict[str, Any], offset: float, fused: bool) -> list[torch.Tensor]:
    """Return dx, dw and dx in the residual's dtype, by PyTorch's own norm in fp32, before they are
    rounded to their dtypes; without `fused` dx is rounded once more, before the residual is
    added."""
    x, weight = t["x"].float().requires_grad_(), t["weight"]
    N = x.shape[-1]
    leaf = torch.ones(N, device=x.device) if weight is None else weight.float()
    leaf.requires_grad_()
    y = torch.nn.functional.rms_norm(x, (N,), leaf + offset if offset else leaf, 1e-6)
    dx, dw = torch.autograd.grad(y, (x, leaf), t["dy"].float())
    if t["dresidual"] is not None:
        dx = (dx if fused else dx.to(t["x"].dtype).float()) + t["dresidual"].float()
    return [dx, dw, dx]


def scales(t: dict[str, Any], offset: float) -> list[torch.Tensor]:
    """Return what the errors of dx, dw and dx in the residual's dtype are relative to: for every
    row the root mean square of dy * rstd * weight and of the residual's gradient (with few columns
    dx is the small rest of a difference); for every column the root of the sum of (dy * xhat)^2."""
    dy, x, rstd = (t[name].double() for name in ("dy", "x", "rstd"))
    weight = offset + (1.0 if t["weight"] is None else t["weight"].double())
    terms = (dy * rstd * weight).square().mean(-1, keepdim=True)
    if t["dresidual"] is not None:
        terms += t["dresidual"].double().square().mean(-1, keepdim=True)
    return [terms.sqrt(), (dy * x * rstd).square().sum(0).sqrt(), terms.sqrt()]


@dataclass
class Errors:
    """The errors of one result: of the backward, of PyTorch, and of the exact one when it is
    rounded."""

    mine: float
    pytorch: float
    rounded: float
    elements: int


def errors(
    case: Case, backward: Any, device: str = "cpu", fused: bool = False
) -> dict[str, Errors]:
    """The errors of the results that there are, by their names."""
    sums: dict[str, torch.Tensor] = {}
    count = dict.fromkeys(RESULTS, 0)
    for i in range(max(2, min(MOST, ceil(ENOUGH / case.N)))):
        t = replace(case, seed=case.seed + (i << 17)).tensors(device)
        results = backward(
            t["dy"],
            t["x"],
            t["rstd"],
            t["weight"],
            weight_offset=case.offset,
            dresidual=t["dresidual"],
        )
        assert len(results) == 2 + bool(case.residual)
        dx, dw = exact(t, case.offset)
        peers, relative = composite(t, case.offset, fused), scales(t, case.offset)
        for name, result, truth, peer, scale in zip(
            RESULTS, results, (dx, dw, dx), peers, relative, strict=False
        ):
            if result is None:
                continue
            assert result.shape == truth.shape
            found = torch.stack([result.double(), *(p.to(result.dtype) for p in (peer, truth))])
            squares = ((found - truth) / scale).square().sum((-1, *range(1, found.dim() - 1)))
            sums[name] = sums.get(name, 0) + squares.cpu()
            count[name] += result.numel()
    return {
        name: Errors(*(total / count[name]).sqrt().tolist(), count[name])
        for name, total in sums.items()
    }


def check(
    case: Case, backward: Any, device: str = "cpu", *, fused: bool = False, chain: int = CHAIN
) -> None:
    """Assert that the errors of `backward` are at most PyTorch's in fp32, rounded once, or what a
    right rounding or fp32 itself makes of the exact results, within the margin.

    fused: the backward adds the residual's gradient before dx is rounded. chain: how many additions
    to dw it makes one after another.
    """
    dx = DX_UNITS + FEW_COLUMNS / case.N
    dw = max(DW_UNITS * sqrt(1 + log2(case.M)), DW_IN_A_ROW * sqrt(min(case.M, chain)))
    for name, error in errors(case, backward, device, fused).items():
        allowed = UNIT * (dw if name == "dw" else dx)
        most = max(error.pytorch, error.rounded, allowed)
        limit = MARGIN * most * (1 + LUCK / sqrt(error.elements))
        assert error.mine <= limit, f"{case}: error of {name}: {error}, at most {limit:.3g}"
