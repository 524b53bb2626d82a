"""What the site needs beyond the pages, which are written to be read in the repository."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to files outside docs/ become their paths: the site does not hold those files."""
    return re.sub(r"\[[^\]]*\]\(\.\./([^)\s]+)\)", r"`\1`", markdown)
