"""What the site needs beyond the pages, which are written to be read in the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent
IMAGE = re.compile(r"!\[[^\]]*\]\((?:\.\./)?(benchmarks/[^)\s]+)\)")
"""An image outside docs/, in the README or a page."""


def as_index(readme: str) -> str:
    """The README as a page among those of docs/."""
    text = re.sub(r"(?<!!)\[[^\]]*\]\((?!docs/|#|\w+://)([^)\s]+)\)", r"`\1`", readme)
    return text.replace("](docs/", "](")


def as_page(text: str) -> str:
    """A page with links that the site can follow. A file that it does not hold becomes its path."""
    text = text.replace("](../README.md", "](index.md")
    text = IMAGE.sub(lambda image: image[0].replace("](../", "]("), text)
    return re.sub(r"(?<!!)\[[^\]]*\]\(\.\./([^)\s]+)\)", r"`\1`", text)


def on_files(files: Any, config: Any) -> Any:
    """Adds the README as the index, and the images outside docs/."""
    from mkdocs.structure.files import File

    texts = [REPOSITORY / "README.md", *Path(config.docs_dir).glob("*.md")]
    for name in sorted({image for page in texts for image in IMAGE.findall(page.read_text())}):
        files.append(File.generated(config, name, abs_src_path=str(REPOSITORY / name)))
    index = as_index(texts[0].read_text(encoding="utf-8"))
    files.append(File.generated(config, "index.md", content=index))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return as_page(markdown)
