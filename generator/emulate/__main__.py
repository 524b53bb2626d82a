"""Run one kernel on the CPU under many schedules, and report races, deadlocks and wrong numbers."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from generator.emulate.build import NO_COMPILER, find_compiler
from generator.emulate.check import PARTICIPANTS, Check, check_variant
from generator.errors import NormforgeError
from generator.kernels.variant import make_variant
from generator.operations import operation_name
from generator.problem import RMSNORM_BACKWARD, Problem
from generator.space.load import load_space, space_file
from generator.target import find_target


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0 when no schedule found anything, 1 when one did, 2 when none could
    be run."""
    options = _parser().parse_args(arguments)
    try:
        if find_compiler() is None:
            raise NormforgeError(NO_COMPILER)
        check = _check(options)
    except NormforgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(asdict(check), indent=2))
    else:
        _print(check)
    return 1 if check.problems else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m generator.emulate", description=__doc__)
    parser.add_argument("--strategy", required=True, help="a reduction strategy, such as semaphore")
    parser.add_argument(
        "--op",
        default=RMSNORM_BACKWARD,
        help="the operation, or the file of one of your own (default: %(default)s)",
    )
    parser.add_argument("--shape", required=True, help="MxN:dtype[:weight dtype]; keep M small")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KNOB=VALUE",
        help="fix a knob of the search space, for example pipeline=bulk; may be repeated",
    )
    parser.add_argument("--gpu", default="h200", help="take a config that is legal on this GPU")
    parser.add_argument("--schedules", type=int, default=50, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first schedule")
    parser.add_argument(
        "--residency", type=int, help="CTAs that run at once (default: 1, half and all, in turn)"
    )
    parser.add_argument(
        "--ctas",
        type=int,
        default=PARTICIPANTS,
        help="CTAs (or clusters) of the grid, at most (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def _check(options: argparse.Namespace) -> Check:
    for name in ("schedules", "ctas", "residency"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise NormforgeError(f"--{name} {value}: at least 1 is needed")
    problem = Problem.parse(options.shape, operation_name(options.op))
    space = load_space(space_file(problem.operation))
    target = find_target(options.gpu)
    fixed = {"strategy": options.strategy, **_settings(options.set)}
    space.normalize(fixed, problem, target)  # this refuses unknown knobs and values
    config = next(space.legal(problem, target, fixed=fixed), None)
    if config is None:
        said = ", ".join(f"{name}={value}" for name, value in fixed.items())
        raise NormforgeError(
            f"{problem} on {target} has no legal config with {said}: change --set, --shape or --gpu"
        )
    return check_variant(
        make_variant(config, problem),
        problem,
        schedules=options.schedules,
        residencies=None if options.residency is None else (options.residency,),
        seed=options.seed,
        participants=options.ctas,
        all_rows=True,
    )


def _settings(texts: Sequence[str]) -> dict[str, int | str]:
    settings: dict[str, int | str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise NormforgeError(f"--set {text}: expected KNOB=VALUE, for example pipeline=bulk")
        settings[name] = int(value) if value.isdigit() else value
    return settings


def _print(check: Check) -> None:
    results = f"{check.distinct_results} different results"
    print(f"{check.variant}: {check.schedules} schedules, {results}")
    if check.errors:
        errors = ", ".join(f"{name} {error:.2e}" for name, error in check.errors.items())
        print(f"relative error against float64: {errors}")
    for problem in check.problems:
        print(f"  {problem}")
    if not check.problems:
        print("no problem found")


if __name__ == "__main__":
    raise SystemExit(main())
