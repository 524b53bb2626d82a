"""`tune.py --gpu ...`: one tuning run, and what it prints."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from generator.evaluate.gpu.evaluator import MeasuredEvaluator
from generator.package.emit import problems_in
from generator.package.entries import Emission
from generator.package.standalone import stands_alone
from generator.paths import results_of
from generator.problem import Problem
from generator.search.budget import TRIALS
from generator.studies.records import Winner
from generator.target import Target
from generator.tuner.choose_device import choose_devices, choose_target
from generator.tuner.device_pool import DevicePool
from generator.tuner.display import Status, table
from generator.tuner.plan import Plan
from generator.tuner.run import Outcome, tune

INTERRUPTED = (
    "tune.py: interrupted; finished trials are kept, and the same command goes on from there"
)

NOTHING = Outcome((), None, False, {}, 0)
"""The outcome of a run that had nothing to do."""


def run(args: argparse.Namespace, problems: list[Problem]) -> int:
    """Do what the parsed command line asks for; returns the exit code. Raises NormforgeError."""
    started = time.monotonic()
    measurer: MeasuredEvaluator | DevicePool | None = None
    try:
        if len(args.devices) == 1:
            target, measurer, sentence = choose_target(args.gpu, args.devices[0])
        else:
            target, measurer, sentence = choose_devices(args.gpu, args.devices)
        plan = _plan(args, problems, target, measured=measurer is not None)
        kept = problems_in(plan.package, target) if args.keep_winners else set()
        left = tuple(problem for problem in problems if problem not in kept)
        todo = replace(plan, problems=left)
        status = Status(len(todo.searched) if left else 0)
        status.say(sentence)
        _print_noise(measurer)
        with status:
            outcome = tune(todo, measurer, status) if left else NOTHING
        _print_noise(measurer)
    except KeyboardInterrupt:
        if isinstance(measurer, DevicePool):
            measurer.close(0)
        print(INTERRUPTED, file=sys.stderr)
        return 130
    finally:
        if measurer is not None:
            with suppress(KeyboardInterrupt):  # its processes end with this one
                measurer.close()
    if args.json:
        seconds = time.monotonic() - started
        print(json.dumps(_document(plan, outcome, seconds), indent=1))
    elif left:
        print(table(outcome.winners))
        if outcome.emission is not None:
            _print_package(outcome.emission)
    if stay := len(problems) - len(left):
        said = f"{stay} of {len(problems)} shapes keep the winners of the package."
        print(said, file=sys.stderr)
    _print_remarks(len(left), outcome)
    missing = len(left) - sum(winner is not None for _, winner in outcome.winners)
    if missing and not outcome.interrupted:
        print(f"{missing} shapes have no winner.", file=sys.stderr)
    return 1 if missing or outcome.interrupted else 0


def _plan(
    args: argparse.Namespace, problems: Sequence[Problem], target: Target, *, measured: bool
) -> Plan:
    """Make the plan that the command line asks for."""
    evidence = "measured" if measured else "predicted"
    trials, further = args.trials or (TRIALS[evidence], False)
    return Plan(
        target=target,
        problems=tuple(problems),
        space_file=args.space,
        out=args.out or results_of(target.name),
        trials=trials,
        further=further,
        seconds=args.seconds,
        storage=args.storage,
        seed=args.seed,
        devices=args.devices if measured else (),
        fallbacks=args.fallbacks,
        standalone=args.standalone,
    )


def _print_remarks(problems: int, outcome: Outcome) -> None:
    """Print to stderr what is worth knowing about a run of so many problems beside its results."""
    if outcome.unchanged:
        print(
            f"{outcome.unchanged} of {problems} shapes were not searched again: what "
            "earlier runs tried counts towards --trials and --seconds.",
            file=sys.stderr,
        )
    replaced = outcome.emission.replaced if outcome.emission else ()
    if replaced:
        print(
            f"Bits of {len(replaced)} shapes may change, because the package had other kernels for "
            f"them (--keep-winners keeps these): {', '.join(replaced)}",
            file=sys.stderr,
        )
    for problem, reason in outcome.failures.items():
        print(f"{problem} has no answer from this run: {reason}", file=sys.stderr)
    if outcome.interrupted:
        print("Interrupted: the same command resumes where this run stopped.", file=sys.stderr)


def _print_package(emission: Emission) -> None:
    needs = "" if stands_alone(emission.package) else "; it imports the library normforge"
    print(f"\nPackage: {emission.package}{needs}")
    for problem in emission.refused:
        print(f"{problem}: the measured winner in the package stays (this run predicted).")


def _print_noise(measurer: MeasuredEvaluator | DevicePool | None) -> None:
    """Say what disturbed the times; a device pool says it when it is closed."""
    if isinstance(measurer, MeasuredEvaluator) and (noise := measurer.disturbances()):
        print(noise, file=sys.stderr)


def _document(plan: Plan, outcome: Outcome, seconds: float) -> dict[str, Any]:
    """The run as one JSON-able document."""
    return {
        "gpu": plan.target.name,
        "evidence": plan.evidence,
        "seconds": round(seconds, 1),
        "interrupted": outcome.interrupted,
        "package": str(outcome.emission.package) if outcome.emission else None,
        "standalone": stands_alone(plan.package),
        "kept_measured": [str(p) for p in outcome.emission.refused] if outcome.emission else [],
        "replaced": list(outcome.emission.replaced) if outcome.emission else [],
        "failures": {str(problem): reason for problem, reason in outcome.failures.items()},
        "shapes": [_row(problem, winner) for problem, winner in outcome.winners],
    }


def _row(problem: Problem, winner: Winner | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "shape": str(problem),
        "M": problem.M,
        "N": problem.N,
        "dtype": problem.dtype,
        "weight_dtype": problem.weight_dtype,
    }
    if winner is None:
        return row | {"strategy": None, "config": None, "us": None, "evidence": None}
    fastest = winner.fastest_nondeterministic
    return row | {
        "strategy": winner.config["strategy"],
        "variant": winner.variant,
        "config": dict(winner.config),
        "us": winner.result.us,
        "floor_us": winner.result.floor_us,
        "floor": winner.floor,
        "ratio": winner.result.ratio,
        "evidence": winner.evidence,
        "determinism": winner.result.determinism,
        "checks": list(winner.result.checks),
        "fastest_nondeterministic": fastest.variant if fastest else None,
        "overhead_of_determinism": winner.overhead_of_determinism,
        "trials": winner.trials,
        "outcomes": dict(winner.counts),
        "reason": winner.reason,
    }
