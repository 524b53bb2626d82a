"""The kernels of a package's folder, and from which folder a call is served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..launch.loaded_kernel import LoadedKernels
from ..table import ForwardTable, Table
from .warn_once import WarnOnce


class Kernels:
    """The contents of a package's folder: both tables, and the kernels as they get loaded.

    Making one reads the tables, compiles nothing and does not touch CUDA. Raises ValueError for a
    damaged table and one of another operation, OSError for none.
    """

    def __init__(self, folder: Path, operation: str) -> None:
        self.folder = folder
        self.backward = Table.load(folder)
        for kernel in self.backward.kernels():
            if kernel.spec.operation != operation:
                raise ValueError(
                    f"{folder} has kernels of {kernel.spec.operation}, and here {operation} is "
                    "computed: take the functions of that operation"
                )
        self.forward = ForwardTable.load(folder)
        self.loaded = LoadedKernels(folder, WarnOnce())


Source = Callable[["int | None"], Kernels]
"""The kernels for the GPU of an index, or with None for the one that this process uses."""


def source_of(folder: Path, operation: str) -> Source:
    """The kernels of one package on every GPU. Raises as Kernels."""
    kernels = Kernels(folder, operation)
    return lambda device: kernels
