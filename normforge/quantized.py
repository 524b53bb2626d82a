"""RMSNorm that is quantized to FP8, by kernels that were tuned for the GPU that this runs on.

    from normforge.quantized import rms_norm_quantized

Where there is no package for a GPU, PyTorch's operators serve.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

__all__ = [
    "explain",
    "operators",
    "rms_norm_quantized",
]

if TYPE_CHECKING:
    from .frontends.quantized import QuantizedPackage

    _package = QuantizedPackage(Path())
    explain = _package.explain
    operators = _package.operators
    rms_norm_quantized = _package.rms_norm_quantized
else:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__package__}.quantized_packages").functions, name)
        setattr(sys.modules[__name__], name, value)
        return value


def __dir__() -> list[str]:
    return __all__
