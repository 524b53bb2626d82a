"""Where the parts of the checkout are."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
TEMPLATES = REPOSITORY / "templates"
SEARCH_SPACES = REPOSITORY / "search_spaces"
GENERATED = REPOSITORY / "generated"
"""The default output folder of each GPU is in here, by its name."""
CACHE = REPOSITORY / ".cache"
RUNTIME = REPOSITORY / "generator" / "runtime"
