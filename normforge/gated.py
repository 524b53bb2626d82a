"""Gated RMSNorms by the kernels that were tuned for the GPU that this runs on.

    from normforge.gated import RMSNormGated, patch, rms_norm_gated

What is here is what a package of the backward of gated RMSNorms in generated/ has, for every
activation and order. Where there is no package for a GPU, PyTorch's operators serve.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

__all__ = [
    "RMSNormGated",
    "explain",
    "operators",
    "patch",
    "rms_norm_gated",
    "unpatch",
]

if TYPE_CHECKING:
    from .frontends.gated import GatedPackage, RMSNormGated

    _package = GatedPackage(Path())
    explain = _package.explain
    operators = _package.operators
    patch = _package.patch
    rms_norm_gated = _package.rms_norm_gated
    unpatch = _package.unpatch
else:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__package__}.gated_packages").functions, name)
        setattr(sys.modules[__name__], name, value)
        return value


def __dir__() -> list[str]:
    return __all__
