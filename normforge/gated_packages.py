"""The packages of gated RMSNorms that come with this library: one set of functions for all GPUs,
activations and orders."""

from __future__ import annotations

from typing import Any

from .frontends.gated import GatedFunctions
from .frontends.gated_node import SERVED
from .operations import GATED
from .packages import Chosen, open_named, tuned_packages
from .serve.kernels import Source

_NAME = "*/gated"


def _source_of(operation: str) -> Source | str:
    """The kernels of an operation, by the GPU, or why there are none."""
    if not tuned_packages(operation):
        return f"there is no tuned package of {operation}"
    try:
        return Chosen(operation)
    except RuntimeError as error:
        return str(error)


functions = GatedFunctions(_source_of, _NAME)
functions.RMSNormGated.__module__ = "normforge.gated"  # pickle finds it there


def _find(name: str) -> Any:
    """The functions by the name that their operator was called with. Raises LookupError."""
    if name.rpartition("/")[2] not in GATED:
        raise LookupError(name)
    return open_named(name)


SERVED.find = _find
