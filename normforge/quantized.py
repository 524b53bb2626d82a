"""RMSNorm that is quantized to FP8, and its backward, by kernels that were tuned for the GPU that
this runs on.

    from normforge.quantized import rms_norm_backward_quantized, rms_norm_quantized

Where there is no package for a GPU, PyTorch's operators serve.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from normforge import functions_of, names_of

__all__ = [
    "explain",
    "operators",
    "rms_norm_backward_quantized",
    "rms_norm_quantized",
]

if TYPE_CHECKING:
    from .frontends.quantized import QuantizedPackage

    _package = QuantizedPackage(Path())
    explain = _package.explain
    operators = _package.operators
    rms_norm_backward_quantized = _package.rms_norm_backward_quantized
    rms_norm_quantized = _package.rms_norm_quantized
else:
    __getattr__ = names_of(functions_of, "quantized_packages", __name__, __all__)


def __dir__() -> list[str]:
    return __all__
