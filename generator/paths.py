"""The paths of the parts of the checkout."""

from __future__ import annotations

from pathlib import Path

import normforge

REPOSITORY = Path(__file__).resolve().parent.parent
TEMPLATES = REPOSITORY / "templates"
INCLUDE = REPOSITORY / "generated" / "include"
"""The headers of sources that are templates, as RMSNorm's kernels have them."""
SEARCH_SPACES = REPOSITORY / "search_spaces"
GENERATED = REPOSITORY / "generated"
"""The folder that runs write to: `results_of` has the folder of each GPU."""
CACHE = REPOSITORY / ".cache"
LIBRARY = REPOSITORY / "normforge"


def template_named(name: str) -> Path:
    """The file of a template or a fragment, whose name is unique over the folders of templates/.
    There may be none."""
    return next(TEMPLATES.rglob(name), TEMPLATES / name)


def header_folders() -> list[Path]:
    """Return the folders in which `#include` of an emitted source finds its headers."""
    return [TEMPLATES, *sorted(path for path in TEMPLATES.iterdir() if path.is_dir()), INCLUDE]


def program_version() -> str:
    """Return the version of the library."""
    return normforge.__version__


def results_of(gpu: str) -> Path:
    """The default output folder of a GPU, whose name can be that of a Python package. Before there
    were such names, it was that of the GPU."""
    old = GENERATED / gpu
    return old if old.is_dir() else GENERATED / gpu.replace("-", "_")
