"""RMSNorm of heads with the rotary embedding behind it, and this alone, by kernels that were tuned
for the GPU that this runs on.

    from normforge.rope import apply_rope, qk_norm_rope, rms_norm_rope

Where there is no package for a GPU, PyTorch's operators serve.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from normforge import functions_of, names_of

__all__ = [
    "apply_rope",
    "explain",
    "operators",
    "qk_norm_rope",
    "rms_norm_rope",
]

if TYPE_CHECKING:
    from .frontends.rope import RotatedPackage

    _package = RotatedPackage(Path())
    apply_rope = _package.apply_rope
    explain = _package.explain
    operators = _package.operators
    qk_norm_rope = _package.qk_norm_rope
    rms_norm_rope = _package.rms_norm_rope
else:
    __getattr__ = names_of(functions_of, "rope_packages", __name__, __all__)


def __dir__() -> list[str]:
    return __all__
