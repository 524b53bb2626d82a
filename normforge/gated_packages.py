"""The packages of gated RMSNorms that come with this library: one set of functions for all GPUs,
activations and orders."""

from __future__ import annotations

from functools import partial

from .frontends.gated import GatedFunctions
from .frontends.gated_node import SERVED
from .operations import GATED
from .packages import open_named, source_by_gpu

_NAME = "*/gated"

functions = GatedFunctions(source_by_gpu, _NAME)
functions.RMSNormGated.__module__ = "normforge.gated"  # pickle finds it there
SERVED.find = partial(open_named, known=GATED)
