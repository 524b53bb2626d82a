"""The common parts of the commands in this folder: options, refusals in one sentence, progress."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from generator.errors import NormforgeError
from generator.evaluate.gpu.rotation import CONDITIONS
from normforge.operations import OPERATIONS

OPTIONS: dict[str, dict[str, Any]] = {
    "module": {"type": Path, "help": "folder of the emitted package"},
    "shapes": {"help": "as for tune.py"},
    "out": {"type": Path, "help": "the results file, .json"},
    "seconds": {"type": float, "help": "start nothing new after this many"},
    "gpu": {"help": "must be the GPU of this machine"},
    "device": {"type": int, "help": "index of the GPU"},
    "seed": {"type": int, "help": "of everything random"},
    "condition": {"choices": list(CONDITIONS), "help": "what operations find in the L2"},
    "resume": {"action": "store_true", "help": "keep the rows that --out has"},
    "op": {"choices": list(OPERATIONS), "help": "the operation"},
}
"""Options that mean the same in every command that has them."""


def command_line(doc: str | None, *required: str, **defaults: Any) -> ArgumentParser:
    """A parser with some of OPTIONS: the required ones, and others with their defaults."""
    parser = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    for name in required:
        parser.add_argument(f"--{name}", required=True, **OPTIONS[name])
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", default=default, **OPTIONS[name])
    return parser


def exit_code(file: str, run: Callable[[], int]) -> int:
    """Return what `run` returns; 2 where it raises NormforgeError, after printing the sentence
    behind the name of the command's file."""
    try:
        return run()
    except NormforgeError as error:
        say(f"{Path(file).name}: {error}")
        return 2


def say(text: str) -> None:
    """Print a line of progress on standard error."""
    if text:
        print(text, file=sys.stderr, flush=True)


def spare_cores() -> int:
    """Processes that may compile while this one measures."""
    return max(1, len(os.sched_getaffinity(0)) - 1)
