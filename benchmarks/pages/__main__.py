"""Write the generated parts of README.md and docs/ anew.

Numbers are of the committed results, and functions of their docstrings.

    python -m benchmarks.pages

A test compares the pages with what this would write.
"""

from __future__ import annotations

import argparse

from benchmarks.pages.blocks import pages, updated
from generator.paths import REPOSITORY

argparse.ArgumentParser(prog="benchmarks.pages", description=__doc__.splitlines()[0]).parse_args()
for page in pages():
    text = page.read_text(encoding="utf-8")
    if (new := updated(text)) != text:
        page.write_text(new, encoding="utf-8")
        print(page.relative_to(REPOSITORY))
