"""The backward of RMSNorm whose dx is also quantized to FP8: for the layer before the norm, which
multiplies by FP8 gradients, while the stream of residuals goes on with dx as it is.

The formats and their rounding are those of the quantized forward (rmsnorm_quantized.py). dx has the
gradient of the residual in it where one is added, and is quantized in fp32, or rounded to x's dtype
first.
"""

from __future__ import annotations

from typing import Any

from .rmsnorm_backward import RMSNORM_BACKWARD, forward
from .rmsnorm_backward import terms as terms_of_norm
from .rmsnorm_quantized import FORMATS
from .row_operation import RowOperation, Terms
from .signature import Signature
from .tensor import number, quantized, scales


def _terms(x: Any, dy: Any, rstd: Any, weight: Any, rounded: float) -> Terms:
    return terms_of_norm(x, dy, rstd, weight)


def _terms_1x128(x: Any, dy: Any, rstd: Any, weight: Any, rounded: float, powers: float) -> Terms:
    return terms_of_norm(x, dy, rstd, weight)


def _operation(of: RowOperation) -> RowOperation:
    """Return RMSNorm's backward with what the forward `of` quantizes of its own result."""
    given = of.signature.scales
    assert given is not None
    powers = [number("powers")] if "powers" in of.signature.names else []
    return RowOperation(
        name=of.name.replace("forward", "backward"),
        signature=Signature(
            *RMSNORM_BACKWARD.signature.tensors,
            quantized("dx8"),
            scales("dx_scales", given.block, given.kind),
            number("rounded"),
            *powers,
            summed=True,
        ),
        terms=_terms_1x128 if powers else _terms,
        forward=forward,
        gradients=RMSNORM_BACKWARD.gradients,
        quantize=of.quantize,
    )


BACKWARD_FORMATS = {name: _operation(forward_of) for name, forward_of in FORMATS.items()}
"""The operations by the format that they give."""
