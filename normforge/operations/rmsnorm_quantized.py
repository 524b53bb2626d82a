"""RMSNorm whose result is quantized to FP8 (e4m3), with a scale for every block of a row's columns.

`fp8_1x128` has scales in fp32 for 128 columns, as DeepSeek-V3 trains ("DeepSeek-V3 Technical
Report", 2024, 3.3.2), and `mxfp8_1x32` powers of two for 32 columns, as the OCP Microscaling
Formats (MX) specification 1.0 says (5.1, 6.3).

What is quantized is y = x * rstd * w in fp32, or, as by a recipe on top of a norm, y rounded to x's
dtype. The functions here say how, in PyTorch: kernels give their bits. The forward with a residual
first adds the stream, h = x + r, in fp32 and rounded once, and normalizes that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .row_operation import Quantized, RowOperation, Terms
from .signature import Signature
from .tensor import (
    Tensor,
    columns,
    number,
    quantized,
    row_out,
    rows,
    rows_out,
    scales,
    summed_rows,
)

if TYPE_CHECKING:
    import torch

LARGEST = 448.0
"""The largest number of e4m3."""
LEAST_AMAX = 1e-10
"""The least largest magnitude that a scale in fp32 is made for, as in vLLM and SGLang: blocks of
zeros have a scale, too."""
_LARGEST_EXPONENT = 8
"""The exponent of the largest power of two in e4m3."""
_NAN_SCALE = 255


def quantize_1x128(y: torch.Tensor, power_of_two: bool = False) -> Quantized:
    """Quantize fp32 rows: each block of 128 columns is divided by its scale, the largest magnitude
    times 1 / 448, and rounded to nearest even. That is what `amax / 448.0` is in PyTorch on a GPU.

    power_of_two: the scale is the least power of two that is no smaller. A block of magnitudes up
    to LEAST_AMAX has the scale of that. An infinity makes the scale infinite, itself a NaN, and the
    finite numbers of its block 0; a NaN makes its block and the scale NaN.
    """
    import torch

    blocks = y.unflatten(-1, (-1, 128))
    amax = blocks.abs().amax(-1, keepdim=True)
    scale = amax.clamp_min(LEAST_AMAX) * (1 / LARGEST)
    if power_of_two:
        up = (scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000
        scale = torch.where(scale.isnan(), scale, up.view(torch.float32))
    values = (blocks / scale).to(torch.float8_e4m3fn)
    return Quantized(values.flatten(-2), scale.squeeze(-1))


def quantize_mx(y: torch.Tensor) -> Quantized:
    """Quantize fp32 rows: each block of 32 columns is divided by 2^(floor(log2(amax)) - 8), of its
    largest magnitude, rounded to nearest even, and numbers beyond 448 are 448.

    A scale is at least 2^-127, which is that of zeros. A block with an infinity or a NaN has a NaN
    as its scale, and NaNs.
    """
    import torch

    blocks = y.unflatten(-1, (-1, 32))
    exponent = blocks.abs().amax(-1, keepdim=True).view(torch.int32) >> 23
    biased = (exponent - _LARGEST_EXPONENT).clamp_min(0)
    finite = exponent < _NAN_SCALE
    inverse = ((254 - biased) << 23).view(torch.float32)
    inverse = torch.where(finite, inverse, torch.nan)
    values = (blocks * inverse).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    scale = torch.where(finite, biased, _NAN_SCALE).to(torch.uint8).view(torch.float8_e8m0fnu)
    return Quantized(values.flatten(-2), scale.squeeze(-1))


def _quantize_1x128(y: torch.Tensor, numbers: Mapping[str, float]) -> Quantized:
    return quantize_1x128(y, bool(numbers["powers"]))


def _quantize_mx(y: torch.Tensor, numbers: Mapping[str, float]) -> Quantized:
    return quantize_mx(y)


def _terms(x: Any, weight: Any, eps: float, rounded: float) -> Terms:
    """Return the terms of y = x * rstd * w, and rstd = 1 / sqrt(mean(x^2) + eps)."""
    rstd = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return {"y": (x * rstd * weight,), "rstd": (rstd,)}


def _terms_1x128(x: Any, weight: Any, eps: float, rounded: float, powers: float) -> Terms:
    return _terms(x, weight, eps, rounded)


def _terms_of_stream(
    h: torch.Tensor, weight: torch.Tensor | float, eps: float, rounded: float, powers: float
) -> Terms:
    """Return the terms of y and rstd of h, and h, the sum of x and r."""
    return {**_terms(h, weight, eps, rounded), "h": (h,)}


def _signature(block: int, kind: str, *options: Tensor, stream: bool = False) -> Signature:
    """Return the tensors of a format. rounded: 1 where what is quantized is y rounded to its
    dtype, else 0. stream: whether x is first added to the residual stream r."""
    return Signature(
        *((rows("x"), rows("r")) if stream else (rows("x"),)),
        columns("weight"),
        rows_out("y", extra=True),
        *((summed_rows("h", "x", "r"),) if stream else ()),
        quantized("y8"),
        scales("y_scales", block, kind),
        row_out("rstd"),
        number("eps"),
        number("rounded"),
        *options,
        row_sums=1,
        summed=True,
    )


RMSNORM_FP8_FORWARD = RowOperation(
    name="rmsnorm_fp8_forward",
    signature=_signature(128, "fp32", number("powers")),
    terms=_terms_1x128,
    quantize=_quantize_1x128,
)
RMSNORM_MXFP8_FORWARD = RowOperation(
    name="rmsnorm_mxfp8_forward",
    signature=_signature(32, "e8m0"),
    terms=_terms,
    quantize=_quantize_mx,
)
RMSNORM_FP8_RESIDUAL_FORWARD = RowOperation(
    name="rmsnorm_fp8_residual_forward",
    signature=_signature(128, "fp32", number("powers"), stream=True),
    terms=_terms_of_stream,
    quantize=_quantize_1x128,
)
FORMATS = {"fp8_1x128": RMSNORM_FP8_FORWARD, "mxfp8_1x32": RMSNORM_MXFP8_FORWARD}
"""The operations by the format that they give."""
STREAM_FORMATS = {"fp8_1x128": RMSNORM_FP8_RESIDUAL_FORWARD}
"""The operations that add a residual stream before, likewise."""
