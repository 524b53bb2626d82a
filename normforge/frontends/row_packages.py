"""The functions of the packages of operations over rows."""

from __future__ import annotations

from typing import Any

from ..operations import GATED, QUANTIZED, ROTATED, SUMMED
from .gated import GatedPackage
from .layer_norm_forward import LayerNormForwardPackage
from .norm_add import NormAddPackage
from .quantized import QuantizedPackage
from .rope import RotatedPackage
from .sum_backward import SumBackwardPackage

ROW_PACKAGES: dict[str, Any] = {
    NormAddPackage.operation: NormAddPackage,
    LayerNormForwardPackage.operation: LayerNormForwardPackage,
    **dict.fromkeys(GATED, GatedPackage),
    **dict.fromkeys(ROTATED, RotatedPackage),
    **dict.fromkeys(QUANTIZED, QuantizedPackage),
    **dict.fromkeys(SUMMED, SumBackwardPackage),
}
"""The class that opens the packages of an operation, by its name."""
