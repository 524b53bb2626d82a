"""The packages of RMSNorm with the rotary embedding that come with this library: one set of
functions for all GPUs and both directions."""

from __future__ import annotations

from functools import partial

from .frontends.rope import RotatedFunctions
from .frontends.rope_node import SERVED
from .operations import ROTATED
from .packages import open_named, source_by_gpu

_NAME = "*/rope"
functions = RotatedFunctions(source_by_gpu, _NAME)
SERVED.find = partial(open_named, known=ROTATED)
