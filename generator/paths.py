"""Where the parts of the checkout are."""

from __future__ import annotations

from pathlib import Path

import normforge

REPOSITORY = Path(__file__).resolve().parent.parent
TEMPLATES = REPOSITORY / "templates"
INCLUDE = REPOSITORY / "generated" / "include"
"""Those headers of sources that are templates, as RMSNorm's kernels have them."""
SEARCH_SPACES = REPOSITORY / "search_spaces"
GENERATED = REPOSITORY / "generated"
"""What runs wrote: `results_of` has the folder of each GPU."""
CACHE = REPOSITORY / ".cache"
LIBRARY = REPOSITORY / "normforge"


def program_version() -> str:
    """That of the library."""
    return normforge.__version__


def results_of(gpu: str) -> Path:
    """The default output folder of a GPU, whose name can be that of a Python package. Before there
    were such names, it was that of the GPU."""
    old = GENERATED / gpu
    return old if old.is_dir() else GENERATED / gpu.replace("-", "_")
