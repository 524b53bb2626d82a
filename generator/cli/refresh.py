"""Today's runtime copied into packages that were written by an older one.

    python -m generator.cli.refresh [FOLDER ...]

Kernels stay as they are. Without a folder, all packages in generated/ are brought up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from generator.cli.arguments import CommandLine, folder_name
from generator.errors import NormforgeError
from generator.package.atomic_folder import writer_lock
from generator.package.files import refresh
from generator.paths import GENERATED


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = CommandLine(prog="generator.cli.refresh", description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", type=folder_name, metavar="FOLDER")
    try:
        args = parser.parse(sys.argv[1:] if argv is None else argv)
        for folder in args.folders or sorted(GENERATED.glob("*/*_backward")):
            _refresh(folder)
    except NormforgeError as error:
        print(f"refresh: {error}", file=sys.stderr)
        return 2
    return 0


def _refresh(folder: Path) -> None:
    """Raises NormforgeError."""
    try:
        with writer_lock(folder):
            refresh(folder)
    except (OSError, ValueError) as error:
        raise NormforgeError(f"{folder} cannot be brought up to date: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
