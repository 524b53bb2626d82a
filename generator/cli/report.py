"""`tune.py report` and `tune.py explain`: what the studies of a run say."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from shlex import quote

from generator.cli.arguments import CommandLine, add_operation, folder_name, storage_url
from generator.errors import NormforgeError, one_line
from generator.paths import results_of
from generator.problem import RMSNORM_BACKWARD, Problem
from generator.report.answer import document, explain_from_package, render_answer
from generator.report.collect import summaries
from generator.report.explain import Explanation, parse_config
from generator.report.page import render_page
from generator.report.text import render_text
from generator.space.load import load_space, space_file
from generator.studies.reader import Study, describe_location, read_studies
from generator.target import find_target


def _studies(args: argparse.Namespace, *, importance: bool) -> tuple[list[Study], str]:
    """The studies that the options name, of all operations, and where they are, as
    `describe_location` has it."""
    if args.gpu is None and args.out is None and args.storage is None:
        raise NormforgeError("name the studies: --gpu h200, --out FOLDER or --storage URL")
    if args.gpu is not None:
        find_target(args.gpu)
    where = args.storage or args.out or results_of(args.gpu)
    try:
        place = describe_location(where)
        studies = read_studies(where, importance=importance)
    except OSError as error:
        raise NormforgeError(
            f"cannot read the studies ({one_line(error)}): put that right, or choose others"
        ) from error
    if args.gpu is not None:
        studies = [study for study in studies if study.gpu == args.gpu]
        if not studies:
            raise NormforgeError(f"{place} has no studies of {args.gpu}")
    if all(study.problem.operation != args.op for study in studies):
        raise NormforgeError(f"{place} has no studies of {args.op}: choose with --op")
    return studies, place


def add_study_options(parser: CommandLine) -> None:
    """Add the options that say which studies to read."""
    parser.add_argument(
        "--gpu",
        help="the GPU whose results to use: those in generated/<gpu>, without --out and --storage",
    )
    add_operation(parser)
    parser.add_argument("--out", type=folder_name, help="the --out of the run")
    parser.add_argument("--storage", type=storage_url, help="the --storage of the run")


def find_study(args: argparse.Namespace, problem: Problem) -> Study:
    """The study of one problem. Raises NormforgeError where there is none."""
    studies, place = _studies(args, importance=False)
    by_gpu = summaries(studies, place, args.op)
    if len(by_gpu) > 1:
        raise NormforgeError(f"{place} has several GPUs: name one with --gpu")
    found = {study.problem: study for study in by_gpu[0].studies}
    if problem not in found:
        near = get_close_matches(str(problem), map(str, found))
        hint = f"; near it are {', '.join(near)}" if near else ""
        raise NormforgeError(f"{place} has no study of {problem}{hint}")
    return found[problem]


def report(argv: list[str]) -> int:
    """`tune.py report`: a page for every GPU, and the same as text."""
    parser = CommandLine(
        prog="tune.py report",
        description="Show the results of all shapes: print them, and write one HTML page per GPU.",
    )
    add_study_options(parser)
    parser.add_argument(
        "--html",
        type=folder_name,
        metavar="FOLDER",
        help="where to write report_<gpu>.html (default: the folder of the results; the current "
        "one with --storage)",
    )
    args = parser.parse(argv)
    studies, place = _studies(args, importance=True)
    options = f"--storage {quote(place)}" if args.storage else ""
    if args.out and not args.storage:
        options = f"--out {quote(str(args.out))}"
    for summary in summaries(studies, place, args.op, options=options, context=True):
        folder = args.html or args.out or (Path() if args.storage else results_of(summary.gpu))
        kind = "" if args.op == RMSNORM_BACKWARD else f"_{args.op}"
        page = folder / f"report_{summary.gpu}{kind}.html"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            page.write_text(render_page(summary), encoding="utf-8")
        except OSError as error:
            raise NormforgeError(f"cannot write {page} ({error.strerror}): use --html") from error
        print(render_text(summary))
        print(f"\nPage: {page}")
    return 0


def explain(argv: list[str]) -> int:
    """`tune.py explain`: why this kernel, and with --config why not that one."""
    parser = CommandLine(
        prog="tune.py explain",
        description="Say why a kernel won at a shape, or why the config in --config did not.",
    )
    add_study_options(parser)
    parser.add_argument("--shape", help="MxN:dtype[:weight dtype][+offset][+residual]")
    parser.add_argument("stray", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument(
        "--config", help="knob=value,...; knobs that are left out have the winner's values"
    )
    parser.add_argument(
        "--space", type=Path, help="file of the search space (default: that of the operation)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse(argv)
    if args.shape is None or args.stray is not None:
        example = args.stray or "4096x4096:bf16"
        raise NormforgeError(f"the shape to explain has an option: write --shape {example}")
    problem = Problem.parse(args.shape, args.op)
    args.op = problem.operation
    space = load_space(args.space or space_file(args.op))
    given = parse_config(args.config, space) if args.config is not None else None
    study = find_study(args, problem)
    why = Explanation(study, space, replace(find_target(study.gpu), sms=study.sms))
    verdict = why.why_not(given) if given is not None else None
    served = explain_from_package((args.out or results_of(study.gpu)) / args.op, problem)
    if args.json:
        print(json.dumps(document(why, verdict, served), indent=1))
    else:
        print(render_answer(why, verdict, served))
    return 0
