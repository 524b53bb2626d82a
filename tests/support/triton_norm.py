"""A Triton kernel that normalises rows as vLLM's batch-invariant `rms_norm` does: one program for a
row, tiles of 1024 columns, sums in fp32. Only for tests that have Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TILE = 1024


@triton.jit
def normalize(x, weight, y, x_stride, y_stride, N, eps, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([1], dtype=tl.float32)
    for begin in range(0, N, TILE):
        column = begin + tl.arange(0, TILE)
        valid = column < N
        wide = tl.load(x + row * x_stride + column, mask=valid, other=0.0).to(tl.float32)
        total += tl.sum(tl.where(valid, wide * wide, 0.0))
    rstd = 1.0 / tl.sqrt(total / N + eps)
    for begin in range(0, N, TILE):
        column = begin + tl.arange(0, TILE)
        valid = column < N
        value = tl.load(x + row * x_stride + column, mask=valid, other=0.0)
        factor = tl.load(weight + column, mask=valid, other=1.0).to(tl.float32)
        result = value.to(tl.float32) * rstd * factor
        tl.store(y + row * y_stride + column, result.to(value.dtype), mask=valid)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return y of contiguous rows (M, N) on the GPU."""
    M, N = x.shape
    y = torch.empty_like(x)
    normalize[(M,)](x, weight, y, x.stride(0), y.stride(0), N, eps, TILE=TILE)
    return y


def compiled(dtype: str, whole: bool, capability: int = 90) -> Any:
    """Compile what a launch on contiguous rows compiles, without a GPU. dtype: bf16, fp16 or fp32;
    whole: N is a multiple of 16, of which Triton makes a kernel of its own."""
    names = ("x", "weight", "y", "x_stride", "y_stride", "N", "eps")
    types = (*[f"*{dtype}"] * 3, *["i32"] * 3, "fp32")
    aligned = range(6 if whole else 3)
    source = ASTSource(
        normalize,
        {**dict(zip(names, types, strict=True)), "TILE": "constexpr"},
        constexprs={"TILE": TILE},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32))
