"""`tune.py report` and `tune.py explain`: what the studies of a run say. What reads them is
imported when the arguments are known to be right, so that a typo is told at once."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from generator.cli.arguments import (
    SHAPE,
    CommandLine,
    add_operation,
    folder_name,
    parse_config,
    storage_url,
)
from generator.errors import NormforgeError, one_line
from generator.paths import results_of
from generator.problem import FORWARDS, RMSNORM_BACKWARD, Problem
from generator.space.load import load_space, space_file
from generator.target import find_target

if TYPE_CHECKING:
    from generator.studies.reader import Study
    from generator.studies.records import StudyFacts


def _studies(
    args: argparse.Namespace, wanted: Callable[[StudyFacts], bool], *, importance: bool = False
) -> tuple[list[Study], list[StudyFacts], str]:
    """Read the studies that the options name. Returns those that are `wanted`, the facts of every
    study of the operation, and the place as `describe_location` puts it. Raises NormforgeError
    where the place has none of the operation."""
    if args.gpu is None and args.out is None and args.storage is None:
        raise NormforgeError("name the studies: --gpu h200, --out FOLDER or --storage URL")
    if args.gpu is not None:
        find_target(args.gpu)
    from generator.studies.reader import describe_location, read_studies

    seen: dict[StudyFacts, None] = {}

    def of_gpu(facts: StudyFacts) -> bool:
        seen[facts] = None
        return args.gpu in (None, facts.gpu) and wanted(facts)

    where = args.storage or args.out or results_of(args.gpu)
    try:
        studies = read_studies(where, importance=importance, wanted=of_gpu)
    except OSError as error:
        raise NormforgeError(
            f"cannot read the studies ({one_line(error)}): put that right, or choose others"
        ) from error
    place = describe_location(where)
    if not seen:
        raise NormforgeError(f"{place} has no study with finished trials")
    found = [facts for facts in seen if args.gpu in (None, facts.gpu)]
    if not found:
        raise NormforgeError(f"{place} has no studies of {args.gpu}")
    found = [facts for facts in found if facts.problem.operation == args.op]
    if not found:
        raise NormforgeError(f"{place} has no studies of {args.op}: choose with --op")
    return studies, found, place


def add_study_options(parser: CommandLine) -> None:
    """Add the options that say which studies to read."""
    parser.add_argument(
        "--gpu",
        help="the GPU whose results to use: those in generated/<gpu>, without --out and --storage",
    )
    add_operation(parser, FORWARDS)
    parser.add_argument("--out", type=folder_name, help="the --out of the run")
    parser.add_argument("--storage", type=storage_url, help="the --storage of the run")


def find_study(args: argparse.Namespace, problem: Problem) -> Study:
    """The study of one problem, without reading the others. Raises NormforgeError where there is
    none."""
    studies, named, place = _studies(args, lambda facts: facts.problem == problem)
    if len({facts.gpu for facts in named}) > 1:
        raise NormforgeError(f"{place} has several GPUs: name one with --gpu")
    if not studies:
        near = get_close_matches(str(problem), {str(facts.problem): None for facts in named})
        hint = f"; near it are {', '.join(near)}" if near else ""
        raise NormforgeError(f"{place} has no study of {problem}{hint}")
    from generator.report.collect import latest

    return latest(studies)[problem]


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
    from generator.report.collect import FREE, summaries
    from generator.report.page import render_page
    from generator.report.text import render_text

    operations = (args.op, FREE.get(args.op))
    studies, _, place = _studies(
        args, lambda facts: facts.problem.operation in operations, importance=True
    )
    if all(study.problem.operation != args.op for study in studies):
        raise NormforgeError(f"{place} has no study of {args.op} with finished trials")
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
    parser.add_argument("--shape", help=SHAPE)
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
    from generator.report import answer
    from generator.report.explain import Explanation

    why = Explanation(study, space, replace(find_target(study.gpu), sms=study.sms))
    verdict = why.why_not(given) if given is not None else None
    package = (args.out or results_of(study.gpu)) / args.op
    if args.json:
        served = answer.explain_from_package(package, problem)
        print(json.dumps(answer.document(why, verdict, served), indent=1))
    else:
        chosen = answer.choose_from_package(package, problem)
        print(answer.render_answer(why, verdict, chosen))
    return 0
