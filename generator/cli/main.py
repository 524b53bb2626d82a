"""Find the fastest deterministic kernel for every shape, and write them as a Python package.

Examples:
  python tune.py --gpu gb200
  python tune.py --gpu h200 --shapes default,tilegym
  python tune.py --gpu auto --shapes 4096x4096:bf16,16384x8192:bf16:fp32 --trials 200 --seconds 600
  python tune.py --gpu h200 --devices 0,1,2,3 --storage postgresql+psycopg://tuner@host/normforge

Show the results of a run (each command has its own --help):
  python tune.py report --gpu h200
  python tune.py explain --gpu h200 --shape 4096x4096:bf16 --config load_hint=default

Check that the package does on this machine's GPU what it says:
  python tune.py check --gpu auto --sample 20

Add what another machine found to the results here:
  python tune.py join /mnt/other/h200 --into generated/h200

Export the package for Hugging Face's kernels, or the trials of a shape for other tuners' tools:
  python tune.py export --gpu h200 --hf FOLDER
  python tune.py export --gpu h200 --shape 4096x4096:bf16 --t4 FILE
  python tune.py export --gpu h200 --shape 4096x4096:bf16 --kernel-tuner FILE
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

from generator.cli.arguments import (
    SHAPE,
    CommandLine,
    add_operation,
    device_list,
    folder_name,
    positive_seconds,
    storage_url,
    trial_count,
)
from generator.errors import NormforgeError
from generator.package.fallback_kernels import FALLBACKS
from generator.paths import program_version
from generator.search.budget import TRIALS
from generator.shape_lists import load_problems
from generator.space.load import load_space, space_file
from generator.target import find_target

COMMANDS = {
    "check": "generator.cli.check",
    "explain": "generator.cli.report",
    "export": "generator.cli.export",
    "join": "generator.cli.join",
    "report": "generator.cli.report",
}
"""The commands that tune nothing, by the first word: the module with a function of that name."""
_WRITE_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EBADF)


def make_parser() -> CommandLine:
    """The command line."""
    parser = CommandLine(
        prog="tune.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _add_what(parser.add_argument_group("what is tuned"))
    _add_how(parser.add_argument_group("how long, and on which GPUs"))
    _add_where(parser.add_argument_group("where results go"))
    parser.add_argument("--version", action="version", version=f"normforge {program_version()}")
    return parser


def _add_what(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--gpu",
        required=True,
        help="a name in search_spaces/gpus.yaml, such as h200, or auto for this machine's GPU. "
        "Times are measured if this machine has the GPU, else predicted",
    )
    add_operation(group)
    group.add_argument(
        "--shapes",
        default="default",
        help=f"comma-separated shapes ({SHAPE}), names in search_spaces/shapes/, or paths of such "
        "files and of those that normforge.collect wrote (default: those in default.yaml there)",
    )
    group.add_argument(
        "--space", type=Path, help="file of the search space (default: that of the operation)"
    )
    group.add_argument(
        "--fallbacks",
        choices=FALLBACKS,
        default="common",
        help="kernels for row lengths that are not tuned: common, for rows of whole 16-byte "
        "vectors in the dtypes of the run (default); all, hundreds for every dtype and row length; "
        "or none. Existing ones are kept",
    )


def _add_how(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--trials",
        type=trial_count,
        help=f"trials per shape (default: {TRIALS['measured']} measured, "
        f"{TRIALS['predicted']} predicted). Those of earlier runs count, but for +40 or the like, "
        "which asks for so many more than a shape had at its last finals",
    )
    group.add_argument(
        "--seconds",
        type=positive_seconds,
        help="total search time, divided equally among the shapes, including the time of earlier "
        "runs of a shape. The finals (2 s per shape on a GPU) and the writing of the package are "
        "not included",
    )
    group.add_argument("--seed", type=int, default=0, help="seed of the search (default: 0)")
    group.add_argument(
        "--devices",
        "--device",
        type=device_list,
        default=(0,),
        metavar="N[,N...]",
        help="indices of this machine's GPUs to measure on; each searches one shape at a time "
        "(default: 0)",
    )


def _add_where(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--storage",
        type=storage_url,
        help="URL of a database to use instead of a file in --out. With PostgreSQL "
        "(postgresql+psycopg://...), runs on any number of machines share the work",
    )
    group.add_argument("--out", type=folder_name, help="output folder (default: generated/<gpu>)")
    group.add_argument(
        "--keep-winners",
        action="store_true",
        help="tune only the shapes that the package in --out has no winner for: no other winner's "
        "bits change",
    )
    group.add_argument(
        "--standalone",
        action="store_true",
        help="write a package that has a copy of the library and needs no other; one that has it "
        "keeps it (`tune.py export --standalone` writes one of a package that has not)",
    )
    group.add_argument("--json", action="store_true", help="print one JSON document at the end")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; the exit code is 0 when every shape has a winner, 1 when one has none
    or the run was asked to end, 2 for bad input, 130 after Ctrl-C. PyTorch and Optuna are imported
    when the arguments are known to be right, so that a typo is told at once."""
    argv = sys.argv[1:] if argv is None else argv
    command = argv[0] if argv and argv[0] in COMMANDS else ""
    try:
        try:
            return _run(argv, command)
        finally:
            if sys.stdout is not None:  # closed by who started this
                sys.stdout.flush()
    except NormforgeError as error:
        message = str(error)
    except OSError as error:
        # What is wrong with a file has its name in the error; a process that cannot be started, or
        # the like, has another number.
        known = sys.stdout is not None and error.errno in _WRITE_ERRORS
        if error.filename is not None or not known:
            raise
        # The interpreter must not try once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # the reader of the pipe has seen enough
            return 1
        message = f"cannot write to the standard output ({error.strerror}): send it elsewhere"
    print(f"tune.py{' ' + command if command else ''}: {message}", file=sys.stderr)
    return 2


def _run(argv: list[str], command: str) -> int:
    """Raises NormforgeError; OSError where stdout cannot be written."""
    if command:
        return int(getattr(import_module(COMMANDS[command]), command)(argv[1:]))
    if argv and not argv[0].startswith("-"):
        near = get_close_matches(argv[0].lower(), COMMANDS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else "a run starts with --gpu"
        raise NormforgeError(f"there is no command '{argv[0]}': {hint}")
    args = make_parser().parse(argv)
    args.space = args.space or space_file(args.op)
    problems = load_problems(args.shapes, args.op)
    load_space(args.space)
    if args.gpu != "auto":
        find_target(args.gpu, "auto")
    from generator.cli.tune import run

    return run(args, problems)
