"""`tune.py export`: a package, or the trials of a shape, in the form that other tools load. What
makes it is imported when the arguments are known to be right."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from generator.cli.arguments import SHAPE, CommandLine, folder_name
from generator.cli.report import add_study_options, find_study
from generator.errors import NormforgeError
from generator.paths import program_version, results_of
from generator.problem import Problem
from generator.target import find_target


def export(argv: list[str]) -> int:
    """Raises NormforgeError."""
    parser = CommandLine(
        prog="tune.py export",
        description="Write a package with a copy of the library, which can be imported under any "
        "name. Or write it as a repository for Hugging Face's kernels (get_kernel and kernelize) "
        "that depends only on PyTorch. Or write the trials of a shape as T4 results, or as a cache "
        "file of Kernel Tuner.",
    )
    form = parser.add_mutually_exclusive_group(required=True)
    for name, what in (("--standalone", "package"), ("--hf", "repository")):
        form.add_argument(
            name,
            type=folder_name,
            metavar="FOLDER",
            help=f"where to write the {what} of --gpu (default here: h200): a new or empty folder, "
            "or an earlier export, which is replaced",
        )
    for name in ("--t4", "--kernel-tuner"):
        form.add_argument(
            name, type=folder_name, metavar="FILE", help="write the trials of --shape to a new file"
        )
    add_study_options(parser)
    parser.add_argument("--shape", help=SHAPE)
    args = parser.parse(argv)
    folder = args.standalone or args.hf
    if folder is None:
        return _export_trials(args)
    if args.shape is not None or args.storage is not None:
        raise NormforgeError("--shape and --storage are for trials, not for packages")
    if args.gpu is not None:
        find_target(args.gpu)
    from generator.package.hub.export import export_package
    from generator.package.standalone import export_standalone

    output = args.out or results_of(args.gpu or "h200")
    write, what = (
        (export_standalone, "Package") if args.standalone else (export_package, "Repository")
    )
    table = write(output / args.op, folder, args.gpu)
    print(f"{what}: {folder}, for {table.target['title']}")
    return 0


def _export_trials(args: argparse.Namespace) -> int:
    if args.shape is None:
        raise NormforgeError("name the shape whose trials to export: --shape 4096x4096:bf16")
    problem = Problem.parse(args.shape, args.op)
    args.op = problem.operation
    study = find_study(args, problem)
    from generator.report.other_tuners import kernel_tuner, t4

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
