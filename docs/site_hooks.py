"""What the site needs beyond the pages, which are written to be read in the repository."""

from __future__ import annotations

import re
from typing import Any


def public_name(path: str) -> str:
    """The name by which a user knows what is at a path of the library: `rms_norm`, or in a module
    of its own `layernorm.patch`."""
    *parts, name = path.split(".")
    modules = {"batch_invariant": "batch_invariant.", "layer_norm": "layernorm.", "gated": "gated."}
    return "".join(modules[part] for part in parts if part in modules) + name


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Anchors of functions are the names that a user knows, not where the code happens to be."""

    def rename(items: Any) -> None:
        for item in items:
            if item.id.startswith("normforge."):
                item.id = public_name(item.id)
            rename(item.children)

    rename(page.toc)
    path = r'(id="|href="#)(normforge\.[.\w]+)'
    return re.sub(path, lambda found: found[1] + public_name(found[2]), html)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to files outside docs/ become their paths: the site does not hold those files."""
    return re.sub(r"\[[^\]]*\]\(\.\./([^)\s]+)\)", r"`\1`", markdown)
