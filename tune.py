#!/usr/bin/env python3
"""Find the fastest deterministic RMSNorm-backward kernel of every shape and write the module.

Examples:
  python tune.py --gpu gb200
  python tune.py --gpu h200 --shapes default,tilegym
  python tune.py --gpu auto --shapes 4096x4096:bf16,16384x8192:bf16:fp32 --trials 200 --seconds 600
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from generator.errors import NormforgeError
from generator.problem import load_problems
from generator.run import TRIALS, Plan, choose_target, tune
from generator.screen import Status, document, table
from generator.space import SPACE_FILE, load_space

GENERATED = Path(__file__).resolve().parent / "generated"


def _positive(kind: type[int] | type[float]):  # type: ignore[no-untyped-def]
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' is no number") from None
        if not value > 0:
            raise argparse.ArgumentTypeError(f"'{text}' must be above 0")
        return value

    return parse


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="tune.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument(
        "--gpu",
        required=True,
        help="a name of search_spaces/gpus.yaml, or auto for the GPU of this machine; "
        "measured when it is here, else predicted",
    )
    found.add_argument(
        "--shapes",
        default="default",
        help="comma-separated: names or paths of shape files, or MxN:dtype[:weight dtype]",
    )
    found.add_argument(
        "--trials",
        type=_positive(int),
        help=f"trials of each shape (default: {TRIALS['measured']} measured, "
        f"{TRIALS['predicted']} predicted)",
    )
    found.add_argument("--seconds", type=_positive(float), help="end the whole run after this")
    found.add_argument("--storage", help="an Optuna storage URL instead of the file in --out")
    found.add_argument("--out", type=Path, help="output folder (default: generated/<gpu>)")
    found.add_argument("--space", type=Path, default=SPACE_FILE, help="the search space's file")
    found.add_argument("--device", type=int, default=0, help="index of the GPU to measure on")
    found.add_argument("--seed", type=int, default=0, help="of the search")
    found.add_argument("--json", action="store_true", help="print one JSON document at the end")
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the command line; the exit code is 0 when every shape has a winner, 1 when one has none
    or the run was interrupted, 2 for bad input."""
    args = parser().parse_args(argv)
    started = time.monotonic()
    measured = None
    try:
        problems = load_problems(args.shapes)
        space = load_space(args.space)
        target, measured, sentence = choose_target(args.gpu, args.device)
        evidence = "measured" if measured else "predicted"
        print(sentence, file=sys.stderr)
        plan = Plan(
            target=target,
            problems=tuple(problems),
            space=space,
            out=args.out or GENERATED / target.name,
            trials=int(args.trials or TRIALS[evidence]),
            seconds=args.seconds,
            storage=args.storage,
            seed=args.seed,
        )
        status = Status(len(problems))
        outcome = tune(plan, measured, status.progress, status.winner)
    except NormforgeError as error:
        print(f"tune.py: {error}", file=sys.stderr)
        return 2
    finally:
        if measured is not None:
            measured.close()
    if args.json:
        seconds = time.monotonic() - started
        print(json.dumps(document(plan, outcome, evidence, seconds), indent=1))
    else:
        print(table(outcome.winners))
        if outcome.emission is not None:
            print(f"\nModule: {outcome.emission.package}")
            for problem in outcome.emission.refused:
                print(f"{problem}: the measured winner in the module stays (this run predicted).")
    if outcome.interrupted:
        print("Interrupted: the same command resumes where this run stopped.", file=sys.stderr)
    missing = len(plan.problems) - sum(winner is not None for _, winner in outcome.winners)
    if missing and not outcome.interrupted:
        print(f"{missing} shapes have no winner.", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
