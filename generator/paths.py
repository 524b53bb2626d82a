"""Where the parts of the checkout are."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
TEMPLATES = REPOSITORY / "templates"
SEARCH_SPACES = REPOSITORY / "search_spaces"
GENERATED = REPOSITORY / "generated"
"""The default output folder of each GPU is in here, by its name."""
CACHE = REPOSITORY / ".cache"
RUNTIME = REPOSITORY / "generator" / "runtime"


def program_version() -> str:
    """Read, not imported: the import takes seconds, because it needs PyTorch."""
    source = (REPOSITORY / "normforge" / "__init__.py").read_text()
    return re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)[0]
