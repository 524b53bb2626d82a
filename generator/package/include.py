"""Headers of emitted sources that are templates, rendered for whoever compiles a source by hand.

    python -m generator.package.include

writes generated/include/ anew, after a change of templates/**/*.cuh.j2.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from generator.kernels.render import headers
from generator.paths import INCLUDE, template_named


def rendered_headers() -> dict[str, str]:
    """The texts of those headers by name."""
    return {name: text for name, text in headers().items() if not template_named(name).exists()}


def write_headers(folder: Path = INCLUDE) -> None:
    """Write them to a folder, which then has nothing else."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, text in rendered_headers().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_headers()
