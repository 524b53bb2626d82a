"""Compare what a module gives on shapes that nobody tuned with tuning those very shapes.

    python -m benchmarks.untuned --module generated/h200/rmsnorm_backward --rows 20 --widths 10 \
        --trials 200 --out benchmarks/results/untuned_h200.json

Draws `--rows` pairs of a tuned N and a random M, and `--widths` pairs of a random N and M, from one
row on and in all dtypes that the module has, or takes those of `--shapes`; searches each anew, and
then times the module's kernel, the found one, ATen and the floor in the same blocks. Nothing is
written to the module. The studies lie beside `--out`, and the results are written after every
shape: a run that was stopped goes on with the same command, which times all shapes again. Exit
code: 1 when shapes are left, or no kernel was found for them.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from math import inf
from statistics import median
from typing import Any

from benchmarks.command import command_line, exit_code, say, spare_cores
from benchmarks.gpu import bench_of, open_session, package_in, paired_ratio, take_turns
from benchmarks.peers.pytorch import aten
from benchmarks.results import machine, write_json
from generator.errors import NormforgeError, ProblemError
from generator.evaluate.gpu.session import Session
from generator.kernels.compile_pool import CompilePool
from generator.problem import Problem
from generator.search.budget import Budget
from generator.search.search import search_problem
from generator.shape_lists import load_problems
from generator.space.legal_configs import LegalConfigs
from generator.space.load import load_space
from generator.studies.records import Winner
from generator.studies.storage import open_storage
from generator.target import Target
from generator.tuner.choose_device import choose_target
from normforge.api import Package


def log_uniform(rng: random.Random, low: int, high: int) -> int:
    """A whole number from low to high, as likely in every octave."""
    return round(low * (high / low) ** rng.random())


def draw(package: Package, rows: int, widths: int, seed: int) -> list[tuple[str, Problem]]:
    """Draw ("M", problem) with a tuned N, then ("N", problem) with none; dtypes in turns;
    log-uniform, M from 1 to 100,000 and N from 128 to 16,384, at most 2^29 elements."""
    rng = random.Random(seed)
    known: dict[str, set[int]] = {}
    for entry in package.table.tuned:
        if entry.N <= 16384:
            known.setdefault(entry.dtype, set()).add(entry.N)
    tuned = {(entry.M, entry.N, entry.dtype) for entry in package.table.tuned}

    found: list[tuple[str, Problem]] = []
    while len(found) < rows + widths:
        kind = "M" if len(found) < rows else "N"
        dtype = sorted(known)[len(found) % len(known)]
        N = rng.choice(sorted(known[dtype])) if kind == "M" else log_uniform(rng, 128, 16384)
        if kind == "N":
            N = N if rng.random() < 0.3 else max(128, N // 64 * 64)  # most models are round
        M = log_uniform(rng, 1, 100_000)
        new = (M, N, dtype) not in tuned if kind == "M" else N not in known[dtype]
        if new and M * N <= 1 << 29:
            found.append((kind, Problem(M, N, dtype, dtype)))
    return found


def named(package: Package, shapes: str) -> list[tuple[str, Problem]]:
    """Return shapes given by name, in the form of tune.py. Raises NormforgeError."""
    known = {entry.N for entry in package.table.tuned}
    return [("M" if p.N in known else "N", p) for p in load_problems(shapes)]


def kernels(problem: Problem, winner: Winner, package: Package) -> dict[str, Any]:
    """Return what a row says of the two kernels: `ours_kernel` is the stem of the module's files,
    None where it has no kernel; `tuned` the variant that the search found, `tuned_config` its
    knobs."""
    choice = package.table.choose(problem.M, problem.N, problem.dtype, problem.weight_dtype)
    return {
        "shape": str(problem),
        "how": choice.how,
        "reason": choice.reason,
        "ours_kernel": choice.kernel.file if choice.kernel else None,
        "tuned": winner.variant,
        "tuned_config": dict(winner.config),
    }


def compare(
    problem: Problem, winner: Winner, package: Package, session: Session, target: Target
) -> dict[str, Any]:
    """Return times of the floor, the module's choice, the kernel tuned for the problem and ATen,
    µs."""
    workload = session.workload(problem)
    inputs = workload.inputs
    tuned = bench_of(workload, winner.config, target)
    operations = {
        "floor": workload.floor,
        "ours": lambda: package.rmsnorm_backward(inputs.dy, inputs.x, inputs.rstd, inputs.weight),
        "tuned": lambda: tuned.run(inputs),
        "aten": aten(inputs),
    }
    rounds = take_turns(session.timer, list(operations.values()))
    times = dict(zip(operations, rounds, strict=True))
    return {
        **kernels(problem, winner, package),
        **{f"{name}_us": round(median(values), 3) for name, values in times.items()},
        **{
            f"ours_over_{name}": round(paired_ratio(times["ours"], times[name]), 4)
            for name in ("floor", "tuned", "aten")
        },
    }


def run(args: argparse.Namespace) -> int:
    """Raises NormforgeError."""
    package = package_in(args.module)
    target, measured, sentence = choose_target(package.table.target["name"], 0)
    if measured is None:
        raise NormforgeError(f"needs the module's GPU: {sentence}")
    say(sentence)
    cases = (
        named(package, args.shapes)
        if args.shapes
        else draw(package, args.rows, args.widths, args.seed)
    )
    started = time.monotonic()
    found: list[tuple[str, Problem, Winner | None]] = []
    space, budget = load_space(), Budget(args.trials)
    with CompilePool(target.arch, spare_cores()) as pool:
        storage = open_storage(args.out.with_suffix(".journal"))
        for kind, problem in cases:
            if time.monotonic() - started >= args.seconds:
                break
            legal = LegalConfigs(space, problem, target)
            try:
                winner = search_problem(legal, pool, measured, storage, budget)
            except ProblemError as error:
                say(str(error))
                winner = None
            found.append((kind, problem, winner))
    measured.close()
    session = open_session()  # CUDA in this process, now that the worker is gone
    rows = []
    for kind, problem, winner in found:
        if winner is not None:
            row = compare(problem, winner, package, session, target)
            rows.append({"unknown": kind, **row})
            print(kind, row["shape"], row["how"], row["ours_over_tuned"], row["ours_over_aten"])
            environment = machine(measured.facts, timed=True)
            document = {"environment": environment, "trials": args.trials, "rows": rows}
            write_json(args.out, document)
    if left := len(cases) - len(rows):
        say(f"untuned.py: {left} shapes are left, or no kernel was found for them")
    return 1 if left else 0


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = command_line(__doc__, "module", "out", seconds=inf, seed=0)
    parser.add_argument("--rows", type=int, default=20, help="shapes with a tuned N")
    parser.add_argument("--widths", type=int, default=10, help="shapes with an N of their own")
    parser.add_argument("--shapes", help="these shapes instead, like those of tune.py")
    parser.add_argument("--trials", type=int, default=200, help="of each search")
    args = parser.parse_args(argv)
    return exit_code(__file__, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
