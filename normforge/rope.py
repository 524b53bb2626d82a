"""RMSNorm of heads with the rotary embedding behind it, by kernels that were tuned for the GPU that
this runs on.

    from normforge.rope import qk_norm_rope, rms_norm_rope

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
    "qk_norm_rope",
    "rms_norm_rope",
]

if TYPE_CHECKING:
    from .frontends.rope import RotatedPackage

    _package = RotatedPackage(Path())
    explain = _package.explain
    operators = _package.operators
    qk_norm_rope = _package.qk_norm_rope
    rms_norm_rope = _package.rms_norm_rope
else:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__package__}.rope_packages").functions, name)
        setattr(sys.modules[__name__], name, value)
        return value


def __dir__() -> list[str]:
    return __all__
