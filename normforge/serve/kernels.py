"""The kernels of a package's folder, and from which folder a call is served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..launch.loaded_kernel import LoadedKernels
from ..table import ForwardTable, Table
from .warn_once import WarnOnce


class Kernels:
    """What the folder of a package holds: both tables, and the kernels as they get loaded.

    Making one reads the tables, compiles nothing and does not touch CUDA. Raises ValueError for a
    damaged table, OSError for none.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.backward = Table.load(folder)
        self.forward = ForwardTable.load(folder)
        self.loaded = LoadedKernels(folder, WarnOnce())


Source = Callable[["int | None"], Kernels]
"""The kernels for the GPU of an index, or with None for the one that this process uses."""


def source_of(folder: Path) -> Source:
    """The same kernels on every GPU."""
    kernels = Kernels(folder)
    return lambda device: kernels
