"""Find the fastest deterministic RMSNorm-backward kernel of every shape and write the module.

Examples:
  python tune.py --gpu gb200
  python tune.py --gpu h200 --shapes default,tilegym
  python tune.py --gpu auto --shapes 4096x4096:bf16,16384x8192:bf16:fp32 --trials 200 --seconds 600
  python tune.py --gpu h200 --devices 0,1,2,3 --storage postgresql+psycopg://tuner@host/normforge

Looking at what a run left behind (each has a --help of its own):
  python tune.py report --gpu h200
  python tune.py explain --gpu h200 --shape 4096x4096:bf16 --config strategy=last_cta
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from contextlib import suppress
from pathlib import Path

from generator.errors import NormforgeError
from generator.evaluate.gpu.evaluator import MeasuredEvaluator
from generator.paths import GENERATED
from generator.problem import load_problems
from generator.space.load import SPACE_FILE, load_space
from generator.tuner.choose_device import choose_devices, choose_target
from generator.tuner.device_pool import DevicePool
from generator.tuner.display import Status, document, table
from generator.tuner.plan import TRIALS, Plan
from generator.tuner.run import tune

LOOKING = ("explain", "report")
"""First words of the commands that look at finished runs; see their --help."""


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


def _devices(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d{1,4}(,\d{1,4})*", text):
        raise argparse.ArgumentTypeError(f"'{text}' is no list of indices like 0,1,2,3")
    return tuple(dict.fromkeys(map(int, text.split(","))))


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
    found.add_argument(
        "--seconds",
        type=_positive(float),
        help="search for so long in all, in equal shares for the shapes; what earlier runs of a "
        "shape took counts, its finals (2 s on a GPU) and the module come on top",
    )
    found.add_argument(
        "--storage",
        help="the URL of a database instead of the file in --out; with PostgreSQL "
        "(postgresql+psycopg://...) any number of runs on any machines share the work",
    )
    found.add_argument("--out", type=Path, help="output folder (default: generated/<gpu>)")
    found.add_argument("--space", type=Path, default=SPACE_FILE, help="the search space's file")
    found.add_argument(
        "--devices",
        "--device",
        type=_devices,
        default=(0,),
        metavar="N[,N...]",
        help="indices of the GPUs of this machine to measure on, one search on each (default: 0)",
    )
    found.add_argument("--seed", type=int, default=0, help="of the search")
    found.add_argument("--json", action="store_true", help="print one JSON document at the end")
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the command line; the exit code is 0 when every shape has a winner, 1 when one has none
    or the run was interrupted, 2 for bad input."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in LOOKING:
        from generator.cli.look import COMMANDS

        try:
            return COMMANDS[argv[0]](argv[1:])
        except NormforgeError as error:
            print(f"tune.py {argv[0]}: {error}", file=sys.stderr)
            return 2
    args = parser().parse_args(argv)
    started = time.monotonic()
    workforce: MeasuredEvaluator | DevicePool | None = None
    try:
        problems = load_problems(args.shapes)
        load_space(args.space)  # a damaged one is told at once, not after a worker has started
        if len(args.devices) == 1:
            target, workforce, sentence = choose_target(args.gpu, args.devices[0])
        else:
            target, workforce, sentence = choose_devices(args.gpu, args.devices)
        evidence = "measured" if workforce else "predicted"
        print(sentence, file=sys.stderr)
        _tell_noise(workforce)
        plan = Plan(
            target=target,
            problems=tuple(problems),
            space_file=args.space,
            out=args.out or GENERATED / target.name,
            trials=int(args.trials or TRIALS[evidence]),
            seconds=args.seconds,
            storage=args.storage,
            seed=args.seed,
            devices=args.devices if workforce else (),
        )
        status = Status(len(problems))
        outcome = tune(plan, workforce, status)
        _tell_noise(workforce)
    except NormforgeError as error:
        print(f"tune.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tune.py: interrupted; finished trials are kept", file=sys.stderr)
        return 1
    finally:
        if workforce is not None:
            with suppress(KeyboardInterrupt):  # its processes end with this one
                workforce.close()
    if args.json:
        seconds = time.monotonic() - started
        print(json.dumps(document(plan, outcome, evidence, seconds), indent=1))
    else:
        print(table(outcome.winners))
        if outcome.emission is not None:
            print(f"\nModule: {outcome.emission.package}")
            for problem in outcome.emission.refused:
                print(f"{problem}: the measured winner in the module stays (this run predicted).")
    for problem, reason in outcome.failures.items():
        print(f"{problem} has no answer from this run: {reason}", file=sys.stderr)
    if outcome.interrupted:
        print("Interrupted: the same command resumes where this run stopped.", file=sys.stderr)
    missing = len(plan.problems) - sum(winner is not None for _, winner in outcome.winners)
    if missing and not outcome.interrupted:
        print(f"{missing} shapes have no winner.", file=sys.stderr)
    return 1 if missing else 0


def _tell_noise(workforce: MeasuredEvaluator | DevicePool | None) -> None:
    """Say what disturbed the times; the processes of a device pool say it themselves."""
    if isinstance(workforce, MeasuredEvaluator) and (noise := workforce.disturbances()):
        print(noise, file=sys.stderr)
