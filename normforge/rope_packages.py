"""The packages of RMSNorm with the rotary embedding that come with this library: one set of
functions for all GPUs and both directions."""

from __future__ import annotations

from typing import Any

from .frontends.rope import RotatedFunctions
from .frontends.rope_node import SERVED
from .operations import ROTATED
from .packages import open_named, source_by_gpu

_NAME = "*/rope"
functions = RotatedFunctions(source_by_gpu, _NAME)


def _find(name: str) -> Any:
    """The functions by the name that their operator was called with. Raises LookupError."""
    if name.rpartition("/")[2] not in ROTATED:
        raise LookupError(name)
    return open_named(name)


SERVED.find = _find
