"""`tune.py check`: whether the kernels of a package do on this machine what the package says."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from generator.cli.arguments import (
    CommandLine,
    add_operation,
    device_list,
    folder_name,
    positive_number,
    positive_seconds,
)
from generator.errors import NormforgeError
from generator.paths import results_of
from generator.problem import Problem
from generator.shape_lists import load_problems
from generator.target import find_target

if TYPE_CHECKING:
    from generator.tuner.check import Checked


def make_parser() -> CommandLine:
    """The command line."""
    parser = CommandLine(
        prog="tune.py check",
        description="Run the tuned kernels of a package on this machine's GPU: do they compute "
        "gradients as accurate as they have to be, the bits that were recorded when they were "
        "tuned, and about as fast? The exit code is 0 if so, 1 if not, and 2 without the GPU.",
    )
    parser.add_argument(
        "--gpu",
        required=True,
        help="auto for this machine's GPU, or its name in search_spaces/gpus.yaml",
    )
    add_operation(parser)
    parser.add_argument(
        "--shapes", help="as for a run: those to check of the package's (default: all)"
    )
    parser.add_argument(
        "--sample",
        type=positive_number,
        metavar="N",
        help="check N of these shapes, spread evenly over them, the same ones each time",
    )
    parser.add_argument(
        "--tolerance",
        type=positive_seconds,
        default=10.0,
        metavar="PERCENT",
        help="how much higher a kernel's time over the floor may be than in the package "
        "(default: %(default)g)",
    )
    parser.add_argument(
        "--device", type=_index, default=0, metavar="N", help="index of the GPU (default: 0)"
    )
    parser.add_argument("--out", type=folder_name, help="the --out of the run that was tuned")
    parser.add_argument("--json", action="store_true", help="print one JSON document at the end")
    return parser


def _index(text: str) -> int:
    found = device_list(text)
    if len(found) > 1:
        raise argparse.ArgumentTypeError(f"'{text}' is more than one GPU")
    return found[0]


def check(argv: list[str]) -> int:
    """Run `tune.py check`. Returns the exit code. Raises NormforgeError."""
    args = make_parser().parse(argv)
    checked: list[Checked] = []
    try:
        problems = None if args.shapes is None else load_problems(args.shapes, args.op)
        if args.gpu != "auto":
            find_target(args.gpu)
        return _check(args, problems, checked)
    except NormforgeError as error:
        if args.json:
            _print_json(checked, passed=False, error=str(error))
        raise
    except KeyboardInterrupt:
        print("tune.py check: interrupted", file=sys.stderr)
        return 130


def _check(args: argparse.Namespace, problems: list[Problem] | None, checked: list[Checked]) -> int:
    """Check the kernels that the options name, each added to `checked` at once, so that what was
    found before an error is known."""
    from generator.tuner.check import check_kernel, choose, stored_kernels, summary
    from generator.tuner.choose_device import open_gpu

    started = time.monotonic()
    if args.gpu != "auto":  # what is wrong with the package is told before a GPU is looked for
        target = find_target(args.gpu)
        stored_kernels((args.out or results_of(target.name)) / args.op, target, args.op)
    target, gpu = open_gpu(args.gpu, args.device)
    try:
        package = (args.out or results_of(target.name)) / args.op
        chosen = choose(stored_kernels(package, target, args.op), problems, args.sample)
        rechecker = gpu.rechecker()
        for stored in chosen:
            if sys.stderr.isatty():
                print(f"\r\x1b[K{len(checked)} of {len(chosen)}: {stored}", end="", file=sys.stderr)
            checked.append(check_kernel(stored, package, rechecker, args.tolerance))
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr)
        facts = dict(gpu.facts)
    finally:
        gpu.close()
    passed = all(one.passed for one in checked)
    if args.json:
        _print_json(
            checked,
            gpu=target.name,
            device=facts.get("name"),
            package=str(package),
            tolerance_percent=args.tolerance,
            seconds=round(time.monotonic() - started, 1),
            passed=passed,
            summary=summary(checked),
        )
    else:
        print(_table(checked))
        print(summary(checked))
    return 0 if passed else 1


def _print_json(checked: list[Checked], **facts: Any) -> None:
    print(json.dumps({**facts, "kernels": [one.to_json() for one in checked]}, indent=1))


def _table(checked: list[Checked]) -> str:
    from generator.text_table import columns

    rows = [("shape", "accuracy", "bits", "x floor", "in package", "time")]
    for one in checked:
        ratio, recorded = (
            "-" if number is None else f"{number:.3f}" for number in (one.ratio, one.recorded_ratio)
        )
        by = "" if one.slower is None else f" ({one.slower:+.1%})"
        rows.append((one.shape, one.accuracy, one.bits, ratio, recorded, one.time + by))
    return columns(rows, right=(3, 4))
