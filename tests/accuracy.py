"""Errors of a backward and of its peers against float64, for random shapes and options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MARGIN = 1.1
FLOOR = 2**-23
"""Relative to the terms that are summed: the last place of fp32, in which everybody computes."""
FEW = 64


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
    """dx and dw in float64, of the rstd that was given."""
    dy, x, rstd = (t[name].double() for name in ("dy", "x", "rstd"))
    xhat = x * rstd
    scale = offset + (1.0 if t["weight"] is None else t["weight"].double())
    g = dy * scale
    dx = rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True))
    if t["dresidual"] is not None:
        dx = dx + t["dresidual"].double()
    return [dx, (dy * xhat).sum(0)]


def composite(t: dict[str, Any], offset: float) -> list[torch.Tensor]:
    """dx and dw by PyTorch: its fused kernel where that takes the arguments, else autograd through
    the norm as models write it, normalising in fp32 and scaling in the dtype of the rows."""
    x, weight = t["x"].detach().requires_grad_(), t["weight"]
    N = x.shape[-1]
    leaf = torch.ones(N, dtype=x.dtype, device=x.device) if weight is None else weight.detach()
    leaf.requires_grad_()
    if leaf.dtype == x.dtype and not offset:
        y = torch.nn.functional.rms_norm(x, (N,), leaf, 1e-6)
    else:
        wide = x.float()
        normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        y = (normalized.to(x.dtype) * (leaf + offset)).to(x.dtype)
    dx, dw = torch.autograd.grad(y, (x, leaf), t["dy"])
    if t["dresidual"] is not None:
        dx = (dx.float() + t["dresidual"].float()).to(x.dtype)
    return [dx, dw]


def check(case: Case, backward: Any, device: str = "cpu") -> None:
    """Assert that the error of `backward` (the norm of the difference) is at most PyTorch's, within
    the margin and the floor."""
    t = case.tensors(device)
    dx, dw, *_ = backward(
        *(t["dy"], t["x"], t["rstd"], t["weight"]),
        weight_offset=case.offset,
        dresidual=t["dresidual"],
    )
    wanted, peers = exact(t, case.offset), composite(t, case.offset)
    # What is summed: with few columns dx is the small rest of a difference.
    scale = case.offset + (1.0 if t["weight"] is None else t["weight"].double())
    terms = {
        "dx": t["dy"].double() * t["rstd"].double() * scale,
        "dw": t["dy"].double() * t["x"].double() * t["rstd"].double(),
    }
    for name, result, reference, peer in zip(terms, (dx, dw), wanted, peers, strict=True):
        if result is None:
            continue
        mine, theirs = (float((r.double() - reference).norm()) for r in (result, peer))
        floor = FLOOR * float(terms[name].norm())
        # A peer may be lucky in the last rounding: of all elements where they are few, of the
        # largest one where it stands out (N = 1 and a tiny x).
        lucky = reference.norm() if result.numel() < FEW else reference.abs().max()
        floor += torch.finfo(result.dtype).eps / 2 * float(lucky)
        limit = MARGIN * theirs + floor
        assert mine <= limit, f"{case}: error of {name} is {mine:.3g}, PyTorch's {theirs:.3g}"
