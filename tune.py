#!/usr/bin/env python3
"""Find the fastest deterministic RMSNorm-backward kernel of every shape and write the module.

    python tune.py --gpu gb200
    python tune.py --help

The command line is generator/cli/main.py. Nothing is imported here before it is needed, because
every process that the tuner starts imports this file again, and a compiler needs no PyTorch.
"""

from __future__ import annotations

import os
import sys

# The matrices of a search are so small that threads only take cores from the compilers. Read once,
# when NumPy is loaded.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; see generator.cli.main.main."""
    from generator.cli.main import main as run

    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
