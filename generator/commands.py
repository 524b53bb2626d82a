"""The subcommands of tune.py that look at what a run left behind."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from difflib import get_close_matches
from pathlib import Path

from generator.budget import Progress
from generator.compile import compile_variant, nvrtc_version
from generator.compile_pool import CompilePool
from generator.errors import NormforgeError
from generator.explain import Explanation, parse_config
from generator.plan import GENERATED
from generator.problem import Problem
from generator.recording import NARROW_FILE, RECORDING_FILE, Recording, load_narrow, record
from generator.replay import CHECKPOINTS, compare, table
from generator.report.answer import ask_package, document, render_answer
from generator.report.page import render_page
from generator.report.summary import summaries
from generator.report.text import render_text
from generator.run import PACKAGE_NAME, choose_target
from generator.space_file import SPACE_FILE, load_space
from generator.store import open_storage
from generator.studies import Study, read_studies, shown
from generator.target import find_target


def _studies(args: argparse.Namespace, *, importance: bool) -> tuple[list[Study], str]:
    """The studies that the options name, and where they are, without a password."""
    if args.gpu is None and args.out is None and args.storage is None:
        raise NormforgeError("name the studies: --gpu h200, --out FOLDER or --storage URL")
    where = args.storage or args.out or GENERATED / args.gpu
    studies = read_studies(where, importance=importance)
    if args.gpu is not None:
        studies = [study for study in studies if study.gpu == args.gpu]
        if not studies:
            raise NormforgeError(f"{shown(where)} has no studies of {args.gpu}")
    return studies, shown(where)


def _name_studies(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", help="only this GPU; without --out and --storage generated/<gpu>")
    parser.add_argument("--out", type=Path, help="the output folder of the run")
    parser.add_argument("--storage", help="the Optuna storage URL of the run")


def report(argv: list[str]) -> int:
    """`tune.py report`: a page for every GPU, and the same as text."""
    parser = argparse.ArgumentParser(
        prog="tune.py report",
        description="Write what the studies say as one HTML page per GPU, and print it as text.",
    )
    _name_studies(parser)
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FOLDER",
        help="folder of report_<gpu>.html (default: --out, generated/<gpu> or the current one)",
    )
    args = parser.parse_args(argv)
    studies, place = _studies(args, importance=True)
    for summary in summaries(studies, place):
        folder = args.html or args.out or (Path() if args.storage else GENERATED / summary.gpu)
        page = folder / f"report_{summary.gpu}.html"
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
    parser = argparse.ArgumentParser(
        prog="tune.py explain",
        description="Say why a kernel won a shape, or why the config given by --config did not.",
    )
    _name_studies(parser)
    parser.add_argument("--shape", required=True, help="MxN:dtype[:weight dtype]")
    parser.add_argument(
        "--config", help="knob=value,...: where it leaves a knob open, the winner's value counts"
    )
    parser.add_argument("--space", type=Path, default=SPACE_FILE, help="the search space's file")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args(argv)
    problem, space = Problem.parse(args.shape), load_space(args.space)
    given = parse_config(args.config, space) if args.config is not None else None
    studies, place = _studies(args, importance=False)
    asked = summaries(studies, place)
    if len(asked) > 1:
        raise NormforgeError(f"{place} has several GPUs: name one with --gpu")
    study = next((s for s in asked[0].studies if s.problem == problem), None)
    if study is None:
        known = get_close_matches(str(problem), [str(s.problem) for s in asked[0].studies])
        hint = f"; near it are {', '.join(known)}" if known else ""
        raise NormforgeError(f"{place} has no study of {problem}{hint}")
    why = Explanation(study, space, replace(find_target(study.gpu), sms=study.sms))
    verdict = why.why_not(given) if given is not None else None
    served = ask_package((args.out or GENERATED / study.gpu) / PACKAGE_NAME, problem)
    if args.json:
        print(json.dumps(document(why, verdict, served), indent=1))
    else:
        print(render_answer(why, verdict, served))
    return 0


def replay(argv: list[str]) -> int:
    """`tune.py replay`: compare searches on a swept space, or sweep one."""
    parser = argparse.ArgumentParser(
        prog="tune.py replay",
        description="Search a recorded space many times without a GPU and compare: random, TPE "
        "alone, and the search of this tuner.",
    )
    parser.add_argument("--recording", type=Path, default=RECORDING_FILE, help="the swept space")
    parser.add_argument("--seeds", type=int, default=50, help="searches of each kind (default: 50)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="instead, sweep the space of --narrow on the GPU of this machine and write FILE",
    )
    parser.add_argument("--narrow", type=Path, default=NARROW_FILE, help="what --record sweeps")
    parser.add_argument("--gpu", default="auto", help="of --record (default: auto)")
    parser.add_argument("--device", type=int, default=0, help="of --record")
    args = parser.parse_args(argv)
    if args.record is not None:
        return _record(args)
    if args.seeds < 1:
        raise NormforgeError("--seeds must be at least 1")
    recording = Recording.load(args.recording)
    compared = compare(recording, args.seeds)
    if args.json:
        said = {"problem": str(recording.problem), "configs": len(recording.entries)}
        said |= {"optimum": recording.optimum, "facts": recording.facts, "after": CHECKPOINTS}
        print(json.dumps(said | {"searches": [asdict(row) for row in compared]}, indent=1))
    else:
        print(table(recording, compared))
    return 0


def _record(args: argparse.Namespace) -> int:
    """Sweep; the study lies beside the file, so that a killed sweep is resumed."""
    swept = load_narrow(args.narrow)
    target, measured, sentence = choose_target(args.gpu, args.device)
    print(sentence, file=sys.stderr)
    if measured is None:
        raise NormforgeError("a sweep is measured: run --record where the GPU is")

    def tell(event: Progress) -> None:
        if event.done % 200 == 0 or event.phase == "finals":
            best = f"best {event.best_us:.2f} us" if event.best_us else "no time yet"
            print(f"{event.phase} {event.done}/{event.total}, {best}", file=sys.stderr, flush=True)

    cores = len(os.sched_getaffinity(0))
    with measured, CompilePool(target.arch, cores, compile=compile_variant) as pool:
        journal = args.record.with_name(args.record.name.split(".")[0] + ".journal")
        facts = {"gpu": measured.facts["name"], "driver": measured.facts["driver"]}
        facts["nvrtc"] = nvrtc_version()
        recording = record(
            *(swept, target, pool, measured, open_storage(journal), facts),
            on_progress=tell,
        )
    recording.save(args.record)
    print(
        f"{args.record}: {len(recording.entries)} configs of {recording.problem} on {target.name}, "
        f"the best at {recording.optimum:.4f} x floor"
    )
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "explain": explain,
    "report": report,
    "replay": replay,
}
"""By the first word of the command line; without one of these words it is a tuning run."""
