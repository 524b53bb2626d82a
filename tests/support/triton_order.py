"""vLLM's batch-invariant `rms_norm` in PyTorch: every addition in the order of the Triton kernel.

The GPU's approximate reciprocal and root are rounded once here, as in the emulator."""

from __future__ import annotations

import torch

TILE, THREADS, OF_THREAD = 1024, 128, 8


def fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return a * b + c of fp32 tensors, rounded once. The product is exact in float64. The sum is
    rounded to odd there, so that rounding it again to fp32 makes no second error."""
    product, c = a.double() * b.double(), c.double()
    total = product + c
    shift = total - product
    error = (product - (total - shift)) + (c - shift)
    even = total.view(torch.int64) % 2 == 0
    towards = torch.where(error > 0, torch.inf, -torch.inf).to(torch.float64)
    odd = torch.where((error != 0) & even, torch.nextafter(total, towards), total)
    return odd.float()


def sum_of_thread(values: tuple[torch.Tensor, ...], form: str, contracted: int) -> torch.Tensor:
    """Return the sum of the squares of 8 values. contracted: how many are in additions that are
    contracted."""

    def plus_square(i: int, total: torch.Tensor) -> torch.Tensor:
        value = values[i]
        return fused(value, value, total) if i < contracted else value * value + total

    if form == "tiles_in_turn":
        total = plus_square(0, values[1] * values[1])
        for i in range(2, OF_THREAD):
            total = plus_square(i, total)
        return total
    contracted = OF_THREAD if contracted else 0
    pairs = [plus_square(i, values[i + 1] * values[i + 1]) for i in range(0, OF_THREAD, 2)]
    return (pairs[0] + pairs[1]) + (pairs[2] + pairs[3])


def sum_of_squares(x: torch.Tensor, form: str) -> torch.Tensor:
    """Return (M,) sums, of rows (M, N) in bf16, fp16 or fp32."""
    M, N = x.shape
    run = 16 // x.element_size()
    rows = torch.nn.functional.pad(x.float(), (0, -N % TILE))
    threads = rows.view(M, -1, OF_THREAD // run, THREADS, run).transpose(2, 3)
    values = threads.reshape(M, -1, THREADS, OF_THREAD).unbind(-1)
    lanes = sum_of_thread(values, form, run if N % 16 == 0 else 0).view(M, -1, 4, 32)
    for mask in (16, 8, 4, 2, 1):
        lanes = lanes + lanes[..., torch.arange(32) ^ mask]
    warps = lanes[..., 0]
    tiles = (warps[..., 0] + warps[..., 2]) + (warps[..., 1] + warps[..., 3])
    total = torch.zeros(M)
    for tile in tiles.unbind(1):
        total = total + tile
    return total


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, form: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y (M, N) and rstd (M,) of rows on the CPU. form: of TILE_FORMS."""
    # float64 rounded to fp32 is one rounding: PyTorch's own root in fp32 is not exact.
    reciprocal = torch.tensor(1 / x.shape[1]).float()
    mean = fused(reciprocal, sum_of_squares(x, form), torch.tensor(eps))
    rstd = (1 / mean.double().sqrt().float().double()).float()
    y = x.float() * rstd[:, None] * weight.float()
    return y.to(x.dtype), rstd
