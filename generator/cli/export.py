"""`tune.py export`: a package, or the trials of a shape, in the form that other tools load."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from generator.cli.arguments import CommandLine, folder_name
from generator.cli.report import add_study_options, find_study
from generator.errors import NormforgeError
from generator.package.hub.export import export_package
from generator.paths import GENERATED, program_version
from generator.problem import Problem
from generator.report.other_tuners import kernel_tuner, t4
from generator.target import find_target


def export(argv: list[str]) -> int:
    """Raises NormforgeError."""
    parser = CommandLine(
        prog="tune.py export",
        description="Write a package as a repository for Hugging Face's kernels (get_kernel and "
        "kernelize) that depends only on PyTorch. Or write the trials of a shape as T4 results, or "
        "as a cache file of Kernel Tuner.",
    )
    form = parser.add_mutually_exclusive_group(required=True)
    form.add_argument(
        "--hf",
        type=folder_name,
        metavar="FOLDER",
        help="where to write the package of --gpu (default here: h200): a new or empty folder, or "
        "an earlier export, which is replaced",
    )
    for name in ("--t4", "--kernel-tuner"):
        form.add_argument(
            name, type=folder_name, metavar="FILE", help="write the trials of --shape to a new file"
        )
    add_study_options(parser)
    parser.add_argument("--shape", help="MxN:dtype[:weight dtype][+offset][+residual]")
    args = parser.parse(argv)
    if args.hf is None:
        return _export_trials(args)
    if args.shape is not None or args.storage is not None:
        raise NormforgeError("--shape and --storage are for trials, not for --hf")
    if args.gpu is not None:
        find_target(args.gpu)
    output = args.out or GENERATED / (args.gpu or "h200")
    table = export_package(output / args.op, args.hf, args.gpu)
    print(f"Repository: {args.hf}, for {table.target['title']}")
    return 0


def _export_trials(args: argparse.Namespace) -> int:
    if args.shape is None:
        raise NormforgeError("name the shape whose trials to export: --shape 4096x4096:bf16")
    problem = Problem.parse(args.shape, args.op)
    args.op = problem.operation
    study = find_study(args, problem)
    file: Path = args.t4 or args.kernel_tuner
    content = t4(study, program_version()) if args.t4 else kernel_tuner(study)
    try:
        with file.open("x", encoding="utf-8") as to:
            to.write(json.dumps(content, indent=1) + "\n")
    except FileExistsError:
        raise NormforgeError(f"{file} exists already: name a new file") from None
    except OSError as error:
        raise NormforgeError(f"cannot write {file} ({error.strerror}): name another") from error
    print(f"{len(study.records)} trials: {file}")
    return 0
