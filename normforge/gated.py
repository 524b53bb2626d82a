"""Gated RMSNorms by the kernels that were tuned for the GPU that this runs on.

    from normforge.gated import RMSNormGated, patch, rms_norm_gated

What is here is what a package of the backward of gated RMSNorms in generated/ has, for every
activation and order. Where there is no package for a GPU, PyTorch's operators serve.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from normforge import functions_of, names_of

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
    __getattr__ = names_of(functions_of, "gated_packages", __name__, __all__)


def __dir__() -> list[str]:
    return __all__
