#!/usr/bin/env python3
"""Find the fastest deterministic kernel for every shape, and write them as a package.

    python tune.py --gpu gb200
    python tune.py --help

The command line is generator/cli/main.py. Nothing is imported here before it is needed, because
every process that the tuner starts imports this file again, and a compiler needs no PyTorch.
"""

from __future__ import annotations

import os
import signal
import sys
from io import TextIOWrapper
from pathlib import Path

# The matrices of a search are so small that threads only take cores from the compilers. Read once,
# when NumPy is loaded.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; see generator.cli.main.main."""
    try:
        from generator.cli.main import main as run

        return run(argv)
    except ModuleNotFoundError as error:
        name = (error.name or "").split(".")[0]
        if name in ("", "generator", "normforge"):
            raise
        print(
            f"tune.py: this Python ({sys.executable}) has no package '{name}': install what is "
            "needed with `pip install -r requirements.txt`, or run tune.py by .venv/bin/python",
            file=sys.stderr,
        )
        return 2


def _interrupted(number: int, frame: object) -> None:
    """End after Ctrl-C where there is nothing to put in order: while modules are imported, or at
    the end."""
    cursor = b"\x1b[?25h" if os.isatty(2) else b""  # a live display hides it
    os.write(2, cursor + b"tune.py: interrupted\n")
    os._exit(128 + number)


if __name__ == "__main__":
    here = str(Path(__file__).resolve().parent)
    if sys.path[:1] != [here]:  # python -P and PYTHONSAFEPATH leave it out
        sys.path.insert(0, here)
    signal.signal(signal.SIGINT, _interrupted)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a name that a terminal cannot show is no error
            stream.reconfigure(errors="backslashreplace")
    sys.exit(main())
