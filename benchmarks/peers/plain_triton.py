"""Norms with neighbours as one plain Triton kernel for each direction: what an afternoon gives.

There is no search but for the launch, and no strategy: sums over the rows are partial sums of each
program and one `torch.sum`. Rows are contiguous, of any number of columns; heads are rotated as
halves. Triton itself is imported with this module.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def _rows(first, rows, N: tl.constexpr, P: tl.constexpr, B: tl.constexpr):
    """Return B rows from the first one on, their places, and which of these there are."""
    at = (first * B + tl.arange(0, B)).to(tl.int64)
    columns = tl.arange(0, P)
    inside = (at < rows)[:, None] & (columns < N)[None, :]
    return at, at[:, None] * N + columns[None, :], inside


@triton.jit
def _weight(W, offset, N: tl.constexpr, P: tl.constexpr):
    columns = tl.arange(0, P)
    return (tl.load(W + columns, mask=columns < N, other=0.0).to(tl.float32) + offset)[None, :]


@triton.jit
def _load(X, places, inside):
    return tl.load(X + places, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _inverse(x, eps, N: tl.constexpr):
    return tl.rsqrt(tl.sum(x * x, 1) / N + eps)[:, None]


@triton.jit
def _quantize(y, OUT, SCALES, at, places, inside, rows, N: tl.constexpr, P: tl.constexpr,
              B: tl.constexpr):  # fmt: skip
    """Store rows in FP8, and the scales of their blocks of 128 columns."""
    blocks = tl.reshape(y, (B, P // 128, 128))
    scale = tl.maximum(tl.max(tl.abs(blocks), 2), 1e-10) * (1 / 448.0)
    narrow = tl.reshape(blocks / scale[:, :, None], (B, P)).to(OUT.dtype.element_ty)
    tl.store(OUT + places, narrow, mask=inside)
    block = tl.arange(0, P // 128)
    here = (at < rows)[:, None] & (block < N // 128)[None, :]
    tl.store(SCALES + at[:, None] * (N // 128) + block[None, :], scale, mask=here)


@triton.jit
def gated_forward(X, Z, W, Y, rows, eps, offset, N: tl.constexpr, P: tl.constexpr,
                  B: tl.constexpr):  # fmt: skip
    _, places, inside = _rows(tl.program_id(0), rows, N, P, B)
    x, z = _load(X, places, inside), _load(Z, places, inside)
    y = x * _inverse(x, eps, N) * _weight(W, offset, N, P) * z * tl.sigmoid(z)
    tl.store(Y + places, y.to(Y.dtype.element_ty), mask=inside)


@triton.jit
def gated_backward(X, Z, DY, W, DX, DZ, PARTIAL, rows, eps, offset, N: tl.constexpr,
                   P: tl.constexpr, B: tl.constexpr):  # fmt: skip
    w = _weight(W, offset, N, P)
    dw = tl.zeros((B, P), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, B), tl.num_programs(0)):
        _, places, inside = _rows(tile, rows, N, P, B)
        x, z, dy = _load(X, places, inside), _load(Z, places, inside), _load(DY, places, inside)
        rstd = _inverse(x, eps, N)
        gate = tl.sigmoid(z)
        normed, dn = x * rstd, dy * z * gate
        dw += dn * normed
        g = dn * w
        mean = tl.sum(g * normed, 1)[:, None] / N
        dz = dy * normed * w * gate * (1 + z * (1 - gate))
        tl.store(DX + places, (rstd * (g - normed * mean)).to(DX.dtype.element_ty), mask=inside)
        tl.store(DZ + places, dz.to(DZ.dtype.element_ty), mask=inside)
    columns = tl.arange(0, P)
    tl.store(PARTIAL + tl.program_id(0) * N + columns, tl.sum(dw, 0), mask=columns < N)


@triton.jit
def add_forward(X, R, W, Y, RSTD, rows, eps, offset, N: tl.constexpr, P: tl.constexpr,
                B: tl.constexpr):  # fmt: skip
    at, places, inside = _rows(tl.program_id(0), rows, N, P, B)
    x = _load(X, places, inside)
    rstd = _inverse(x, eps, N)
    y = _load(R, places, inside) + x * rstd * _weight(W, offset, N, P)
    tl.store(Y + places, y.to(Y.dtype.element_ty), mask=inside)
    tl.store(RSTD + at[:, None], rstd, mask=(at < rows)[:, None])


@triton.jit
def fp8_forward(X, W, Y8, SCALES, RSTD, rows, eps, offset, N: tl.constexpr, P: tl.constexpr,
                B: tl.constexpr):  # fmt: skip
    at, places, inside = _rows(tl.program_id(0), rows, N, P, B)
    x = _load(X, places, inside)
    rstd = _inverse(x, eps, N)
    y = x * rstd * _weight(W, offset, N, P)
    _quantize(y, Y8, SCALES, at, places, inside, rows, N, P, B)
    tl.store(RSTD + at[:, None], rstd, mask=(at < rows)[:, None])


@triton.jit
def fp8_residual_forward(X, R, W, H, Y8, SCALES, RSTD, rows, eps, offset, N: tl.constexpr,
                         P: tl.constexpr, B: tl.constexpr):  # fmt: skip
    at, places, inside = _rows(tl.program_id(0), rows, N, P, B)
    h = (_load(X, places, inside) + _load(R, places, inside)).to(H.dtype.element_ty)
    tl.store(H + places, h, mask=inside)
    x = h.to(tl.float32)
    rstd = _inverse(x, eps, N)
    y = x * rstd * _weight(W, offset, N, P)
    _quantize(y, Y8, SCALES, at, places, inside, rows, N, P, B)
    tl.store(RSTD + at[:, None], rstd, mask=(at < rows)[:, None])


@triton.jit
def fp8_backward(X, DY, RSTD, W, RESIDUAL, DX, DX8, SCALES, PARTIAL, rows, offset,
                 ADDS: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
                 B: tl.constexpr):  # fmt: skip
    w = _weight(W, offset, N, P)
    dw = tl.zeros((B, P), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, B), tl.num_programs(0)):
        at, places, inside = _rows(tile, rows, N, P, B)
        x, dy = _load(X, places, inside), _load(DY, places, inside)
        rstd = tl.load(RSTD + at, mask=at < rows, other=0.0)[:, None]
        normed = x * rstd
        dw += dy * normed
        g = dy * w
        dx = rstd * (g - normed * (tl.sum(g * normed, 1)[:, None] / N))
        if ADDS:
            dx += _load(RESIDUAL, places, inside)
        tl.store(DX + places, dx.to(DX.dtype.element_ty), mask=inside)
        _quantize(dx, DX8, SCALES, at, places, inside, rows, N, P, B)
    columns = tl.arange(0, P)
    tl.store(PARTIAL + tl.program_id(0) * N + columns, tl.sum(dw, 0), mask=columns < N)


@triton.jit
def _halves(first, rows, N: tl.constexpr, B: tl.constexpr):
    """Return B rows of heads from the first one on, the places of their first halves, and whether
    there are such rows."""
    at = (first * B + tl.arange(0, B)).to(tl.int64)
    columns = tl.arange(0, N // 2)
    return at, at[:, None] * N + columns[None, :], (at < rows)[:, None] & (columns >= 0)[None, :]


@triton.jit
def _angles(C, S, at, rows, heads, N: tl.constexpr):
    columns = tl.arange(0, N // 2)
    places = (at // heads)[:, None] * (N // 2) + columns[None, :]
    inside = (at < rows)[:, None] & (columns >= 0)[None, :]
    return _load(C, places, inside), _load(S, places, inside)


@triton.jit
def rope_forward(X, W, C, S, Y, rows, heads, eps, offset, N: tl.constexpr,
                 B: tl.constexpr):  # fmt: skip
    half: tl.constexpr = N // 2
    at, places, inside = _halves(tl.program_id(0), rows, N, B)
    a, b = _load(X, places, inside), _load(X + half, places, inside)
    rstd = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / N + eps)[:, None]
    a = a * rstd * _weight(W, offset, half, half)
    b = b * rstd * _weight(W + half, offset, half, half)
    cos, sin = _angles(C, S, at, rows, heads, N)
    tl.store(Y + places, (a * cos - b * sin).to(Y.dtype.element_ty), mask=inside)
    tl.store(Y + half + places, (b * cos + a * sin).to(Y.dtype.element_ty), mask=inside)


@triton.jit
def rope_backward(X, DY, W, C, S, DX, PARTIAL, rows, heads, eps, offset, N: tl.constexpr,
                  B: tl.constexpr):  # fmt: skip
    half: tl.constexpr = N // 2
    v, w = _weight(W, offset, half, half), _weight(W + half, offset, half, half)
    dv, dw = tl.zeros((B, half), tl.float32), tl.zeros((B, half), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, B), tl.num_programs(0)):
        at, places, inside = _halves(tile, rows, N, B)
        a, b = _load(X, places, inside), _load(X + half, places, inside)
        da, db = _load(DY, places, inside), _load(DY + half, places, inside)
        rstd = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / N + eps)[:, None]
        a, b = a * rstd, b * rstd
        cos, sin = _angles(C, S, at, rows, heads, N)
        d, e = da * cos + db * sin, db * cos - da * sin
        dv += d * a
        dw += e * b
        d, e = d * v, e * w
        mean = (tl.sum(d * a, 1) + tl.sum(e * b, 1))[:, None] / N
        tl.store(DX + places, (rstd * (d - a * mean)).to(DX.dtype.element_ty), mask=inside)
        tl.store(DX + half + places, (rstd * (e - b * mean)).to(DX.dtype.element_ty), mask=inside)
    columns = tl.program_id(0) * N + tl.arange(0, half)
    tl.store(PARTIAL + columns, tl.sum(dv, 0))
    tl.store(PARTIAL + columns + half, tl.sum(dw, 0))


@triton.jit
def rope(X, C, S, Y, rows, heads, sign, N: tl.constexpr, B: tl.constexpr):
    half: tl.constexpr = N // 2
    at, places, inside = _halves(tl.program_id(0), rows, N, B)
    a, b = _load(X, places, inside), _load(X + half, places, inside)
    cos, sin = _angles(C, S, at, rows, heads, N)
    sin *= sign
    tl.store(Y + places, (a * cos - b * sin).to(Y.dtype.element_ty), mask=inside)
    tl.store(Y + half + places, (b * cos + a * sin).to(Y.dtype.element_ty), mask=inside)


def columns_of(x: Any) -> dict[str, int]:
    """Return the columns of rows, and the power of two that a kernel makes of them."""
    return {"N": x.shape[-1], "P": triton.next_power_of_2(x.shape[-1])}
