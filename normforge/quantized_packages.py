"""The packages of RMSNorm that is quantized to FP8 that come with this library: one set of
functions for all GPUs and formats."""

from __future__ import annotations

from functools import partial
from typing import Any

from .frontends.quantized import QuantizedFunctions
from .frontends.quantized_node import SERVED
from .operations import QUANTIZED
from .packages import chosen, open_named, source_by_gpu

_NAME = "*/quantized"


def _norm() -> Any:
    """The RMSNorm for the GPU, whose backward serves; None without a package."""
    try:
        package: Any = chosen("rmsnorm_backward")
    except RuntimeError:
        return None
    return package._norm


functions = QuantizedFunctions(source_by_gpu, _NAME, _norm)
SERVED.find = partial(open_named, known=QUANTIZED)
