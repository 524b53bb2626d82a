"""Recipes that quantize rows to FP8 in blocks of 128 columns, as libraries write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from tests.support.entry_points import randn

M, N, EPS, LARGEST = 6, 256, 1e-6, 448.0
E4M3 = torch.float8_e4m3fn
Pair = tuple[torch.Tensor, torch.Tensor]


def by_quotient(y: torch.Tensor) -> Pair:
    blocks = y.float().unflatten(-1, (-1, 128))
    scale = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-12) / LARGEST
    return (blocks / scale).to(E4M3).flatten(-2), scale.squeeze(-1)


def _by_reciprocal_of(y: torch.Tensor, rounded: Callable[[torch.Tensor], torch.Tensor]) -> Pair:
    view = y.view(M, -1, 128)
    amax = view.abs().float().amax(dim=2).view(M, -1).clamp(1e-4)
    scale = rounded(amax / LARGEST)
    return (view * (1.0 / scale.unsqueeze(2))).to(E4M3).view(M, N), scale


def by_reciprocal(y: torch.Tensor) -> Pair:
    """DeepGEMM's."""
    return _by_reciprocal_of(y, lambda s: s)


def by_inverse(y: torch.Tensor) -> Pair:
    """An older one of DeepGEMM."""
    view = y.view(M, -1, 128)
    amax = view.abs().float().amax(dim=2).view(M, -1).clamp(1e-4)
    return (view * (LARGEST / amax.unsqueeze(2))).to(E4M3).view(M, N), (amax / LARGEST).view(M, -1)


def clamped(y: torch.Tensor) -> Pair:
    """torchao's, which returns the reciprocal of what it multiplies with."""
    tiles = y.reshape(-1, 128)
    largest = tiles.abs().max(dim=1, keepdim=True)[0].clamp(min=1e-12, max=float("inf"))
    inverse = (LARGEST / largest.to(torch.float64)).to(torch.float32)
    y8 = (tiles * inverse).clamp(min=-LARGEST, max=LARGEST).to(E4M3)
    return y8.reshape(y.shape), inverse.reciprocal().reshape(M, -1)


def by_product(y: torch.Tensor) -> Pair:
    tiles = y.reshape(-1, 128)
    scale = torch.amax(torch.abs(tiles), -1, keepdim=True).to(torch.float32) * (1 / LARGEST)
    return torch.div(tiles, scale).to(E4M3).reshape(y.shape), scale.reshape(M, -1)


def by_logarithm(y: torch.Tensor) -> Pair:
    """DeepGEMM's where scales are powers of two, until 2025."""
    return _by_reciprocal_of(y, lambda s: torch.pow(2.0, torch.ceil(torch.log2(s.abs()))))


def up_by_bits(
    scale: torch.Tensor,
    mantissa: int = 0x7FFFFF,
    least: int | None = 1,
    most: int | None = 254,
) -> torch.Tensor:
    bits = scale.abs().float().view(torch.int)
    exponent = ((bits >> 23) & 0xFF) + (bits & mantissa).bool().int()
    return (exponent.clamp(least, most) << 23).view(torch.float)


def by_bits(y: torch.Tensor) -> Pair:
    """DeepGEMM's of today."""
    return _by_reciprocal_of(y, up_by_bits)


def _carried(scale: torch.Tensor, most: int = 0x7FFFFF, kept: int = 0x7F800000) -> torch.Tensor:
    return (scale.view(torch.int32) + most & kept).view(torch.float32)


def by_carry(y: torch.Tensor) -> Pair:
    return _by_reciprocal_of(y, _carried)


def by_exponent(y: torch.Tensor) -> Pair:
    blocks = y.float().unflatten(-1, (-1, 128))
    scale = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-12) / LARGEST
    scale = scale.log2().ceil().exp2()
    return (blocks / scale).to(E4M3).flatten(-2), scale.squeeze(-1)


def by_bits_below(y: torch.Tensor) -> Pair:
    """With the exponent kept below that of infinity alone."""
    return _by_reciprocal_of(y, lambda s: up_by_bits(s, least=None))


def by_bits_above(y: torch.Tensor) -> Pair:
    return _by_reciprocal_of(y, lambda s: up_by_bits(s, most=None))


POWERS = [by_logarithm, by_bits, by_bits_below, by_bits_above, by_carry, by_exponent]
"""Recipes whose scales are powers of two."""
SPELLINGS = [by_quotient, by_reciprocal, by_inverse, clamped, by_product, *POWERS]


def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, (N,), w, EPS)


def given(dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    rows = randn(M, N, dtype=dtype)
    rows[1] *= 1e3
    rows[2, :128] *= 1e-3
    return [rows, randn(N, seed=2, dtype=dtype)]


def check_pair(found: Pair, wanted: Pair) -> None:
    """Compare rows in FP8, of which a few may be rounded to the other side, and their scales."""
    assert found[0].dtype == wanted[0].dtype and found[0].shape == wanted[0].shape
    one, other = (pair[0].view(torch.uint8).int() for pair in (found, wanted))
    assert (one - other).abs().max() <= 1 and (one != other).float().mean() < 0.01
    torch.testing.assert_close(found[1], wanted[1], rtol=3e-7, atol=0)


class Linear(torch.autograd.Function):
    """A recipe: what is multiplied is quantized, also the gradient."""

    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, m: torch.Tensor, recipe: Callable[..., Pair] = by_quotient
    ) -> torch.Tensor:
        y8, scales = recipe(y)
        ctx.recipe = recipe
        ctx.save_for_backward(y, m)
        return (y8.float().unflatten(-1, (-1, 128)) * scales[..., None]).flatten(-2).to(y.dtype) @ m

    @staticmethod
    def backward(ctx: Any, dz: torch.Tensor) -> Any:  # type: ignore[override]
        y, m = ctx.saved_tensors
        z8, scales = ctx.recipe(dz)
        dz = (z8.float().unflatten(-1, (-1, 128)) * scales[..., None]).flatten(-2).to(dz.dtype)
        return dz @ m.T, y.T @ dz, None


def layer(
    x: torch.Tensor,
    r: torch.Tensor,
    w: torch.Tensor,
    m: torch.Tensor,
    recipe: Callable[..., Pair] = by_quotient,
) -> torch.Tensor:
    """The stream, a norm, a product and the stream: dx is what the product before quantizes."""
    h = x + Linear.apply(r, m, recipe)
    return h + Linear.apply(norm(h, w), m, recipe)


def training_step(
    function: Any, *leaves: torch.Tensor, dynamic: bool = False
) -> list[torch.Tensor]:
    given = [one.detach().requires_grad_() for one in leaves]
    for rows in given[: 2 * dynamic]:
        torch._dynamo.mark_dynamic(rows, 0)
    result = function(*given)
    return [result, *torch.autograd.grad(result, given, torch.ones_like(result).cumsum(0))]


def twice(y: torch.Tensor) -> Any:
    return *by_quotient(y), *by_quotient(y)


def two_scales(y: torch.Tensor) -> Any:
    blocks = y.float().view(M, -1, 128)
    amax = blocks.abs().amax(-1, keepdim=True)
    return (blocks / (amax / LARGEST)).to(E4M3), amax / LARGEST, (amax / LARGEST) * 1.0


# ---- Others that look like them ------------------------------------------------------------------


def mean_of_blocks(y: torch.Tensor) -> Any:
    blocks = y.float().unflatten(-1, (-1, 128))
    scale = blocks.abs().mean(-1, keepdim=True) / LARGEST
    return (blocks / scale).to(E4M3), scale


def signed(y: torch.Tensor) -> Any:
    blocks = y.float().unflatten(-1, (-1, 128))
    scale = blocks.amax(-1, keepdim=True) / LARGEST
    return (blocks / scale).to(E4M3), scale


def of_64_columns(y: torch.Tensor) -> Any:
    blocks = y.float().unflatten(-1, (-1, 64))
    scale = blocks.abs().amax(-1, keepdim=True) / LARGEST
    return (blocks / scale).to(E4M3), scale


def of_rows(y: torch.Tensor) -> Any:
    scale = y.abs().amax(-1, keepdim=True).float() / LARGEST
    return (y / scale).to(E4M3), scale


def of_columns(y: torch.Tensor) -> Any:
    """128 rows of a column."""
    blocks = y.t().reshape(-1, 128) if M % 128 == 0 else y.t().reshape(-1, M)
    scale = blocks.abs().amax(-1, keepdim=True).float() / LARGEST
    return (blocks / scale).to(E4M3), scale


def across(y: torch.Tensor) -> Any:
    """The largest of the blocks of a place, not of its own."""
    blocks = y.float().view(M, 2, 128)
    scale = blocks.abs().amax(1, keepdim=True) / LARGEST
    return (blocks / scale).to(E4M3), scale


def other_blocks(y: torch.Tensor) -> Any:
    """The scales of the rows turned around."""
    blocks = y.float().view(-1, 128)
    scale = (blocks.abs().amax(-1, keepdim=True) / LARGEST).flip(0)
    return (blocks / scale).to(E4M3), scale


def to_240(y: torch.Tensor) -> Any:
    blocks = y.float().view(-1, 128)
    scale = blocks.abs().amax(-1, keepdim=True) / 240.0
    return (blocks / scale).to(E4M3), scale


def to_e5m2(y: torch.Tensor) -> Any:
    blocks = y.float().view(-1, 128)
    scale = blocks.abs().amax(-1, keepdim=True) / LARGEST
    return (blocks / scale).to(torch.float8_e5m2), scale


def multiplied(y: torch.Tensor) -> Any:
    """With the scale, not with its reciprocal."""
    blocks = y.float().view(-1, 128)
    scale = blocks.abs().amax(-1, keepdim=True) / LARGEST
    return (blocks * scale).to(E4M3), scale


def narrow_scales(y: torch.Tensor) -> Any:
    blocks = y.view(-1, 128)
    scale = blocks.abs().amax(-1, keepdim=True) / LARGEST
    return (blocks / scale).to(E4M3), scale


def cast_scales(y: torch.Tensor) -> Any:
    blocks = y.float().view(-1, 128)
    scale = (blocks.abs().amax(-1, keepdim=True) / LARGEST).bfloat16()
    return (blocks / scale).to(E4M3), scale


def rounded_before(y: torch.Tensor) -> Any:
    blocks = y.float().view(-1, 128)
    scale = blocks.abs().amax(-1, keepdim=True) / LARGEST
    return (blocks / scale).bfloat16().to(E4M3), scale


def of_large_blocks_alone(y: torch.Tensor) -> Any:
    """Its least amax is not there to avoid a division by zero."""
    blocks = y.float().view(-1, 128)
    scale = blocks.abs().amax(-1, keepdim=True).clamp_min(0.5) / LARGEST
    return (blocks / scale).to(E4M3), scale


def capped(y: torch.Tensor) -> Any:
    blocks = y.float().view(-1, 128)
    scale = blocks.abs().amax(-1, keepdim=True).clamp(1e-12, 2.0) / LARGEST
    return (blocks / scale).to(E4M3), scale


def cut(y: torch.Tensor) -> Any:
    """Its numbers are clamped to less than FP8 has."""
    blocks = y.float().view(-1, 128)
    scale = blocks.abs().amax(-1, keepdim=True) / LARGEST
    return (blocks / scale).clamp(-240.0, 240.0).to(E4M3), scale


def others_are_quantized(y: torch.Tensor) -> Any:
    """More than the rows is scaled."""
    blocks = y.float().view(-1, 128)
    scale = blocks.abs().amax(-1, keepdim=True) / LARGEST
    return ((blocks + 1) / scale).to(E4M3), scale


def of_every_other_column(y: torch.Tensor) -> Any:
    """There are as many of these as of blocks."""
    scale = y.float().view(M, 128, 2).abs().amax(1).view(M, 2, 1) / LARGEST
    return (y.float().view(M, 2, 128) / scale).to(E4M3), scale


def each_by_each(y: torch.Tensor) -> Any:
    tiles = y.float().view(1, -1, 128)
    scale = tiles.abs().amax(-1, keepdim=True) / LARGEST
    return (tiles / scale.view(-1, 1, 1)).to(E4M3), scale


def by_nothing(y: torch.Tensor) -> Any:
    scale = 0.0 * y.float().view(-1, 128).abs().amax(-1, keepdim=True)
    return (y.float().view(-1, 128) / scale).to(E4M3), 1.0 / scale


def _to_power(exponent: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], Any]:
    def recipe(y: torch.Tensor) -> Any:
        blocks = y.float().view(-1, 128)
        scale = exponent(blocks.abs().amax(-1, keepdim=True) / LARGEST)
        return (blocks / scale).to(E4M3), scale

    return recipe


def _bits(scale: torch.Tensor) -> torch.Tensor:
    return scale.view(torch.int32)


OTHER_POWERS = {
    "the power below": _to_power(lambda s: s.log2().floor().exp2()),
    "the nearest one": _to_power(lambda s: s.log2().round().exp2()),
    "the next one": _to_power(lambda s: (s.log2().ceil() + 1).exp2()),
    "of four": _to_power(lambda s: 4.0 ** s.log2().ceil()),
    "squared": _to_power(lambda s: s.log2().ceil() ** 2.0),
    "no whole one": _to_power(lambda s: s.log2().exp2()),
    "twice that": _to_power(lambda s: 2.0 * s.log2().ceil().exp2()),
    "of the largest": _to_power(lambda s: (s * LARGEST).log2().ceil().exp2() / LARGEST),
    "without the mantissa": _to_power(lambda s: ((_bits(s) >> 23) << 23).view(torch.float32)),
    "always the next": _to_power(lambda s: (((_bits(s) >> 23) + 1) << 23).view(torch.float32)),
    "of a part of it": _to_power(lambda s: up_by_bits(s, mantissa=0x3FFFFF)),
    "twice the exponent": _to_power(
        lambda s: ((_bits(s) >> 23) + (_bits(s) >> 23) << 23).view(torch.float32)
    ),
    "a carry of a part": _to_power(lambda s: _carried(s, most=0x3FFFFF)),
    "another carry": _to_power(lambda s: _carried(s, kept=0x7FC00000)),
    "at least one": _to_power(lambda s: up_by_bits(s, least=127)),
}
"""Scales that are powers, but not the least of two that are no smaller."""


def multiplied_by_a_power(y: torch.Tensor) -> Any:
    blocks = y.float().view(-1, 128)
    scale = (blocks.abs().amax(-1, keepdim=True) / LARGEST).log2().ceil().exp2()
    return (blocks * scale).to(E4M3), scale


NO_RECIPES = [
    *OTHER_POWERS.values(),
    multiplied_by_a_power,
    of_every_other_column,
    each_by_each,
    by_nothing,
    mean_of_blocks,
    signed,
    of_64_columns,
    of_rows,
    of_columns,
    across,
    other_blocks,
    to_240,
    to_e5m2,
    multiplied,
    narrow_scales,
    cast_scales,
    rounded_before,
    of_large_blocks_alone,
    capped,
    cut,
    others_are_quantized,
]
"""Quantizations that are not in blocks of 128 columns, or not by their largest magnitudes."""
