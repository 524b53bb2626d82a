"""Set norms that are fused with their neighbours beside what else computes them, in one run.

    python -m benchmarks.neighbours --packages generated/h200 --out FILE.json

Every operation of --ops is timed at the shapes that its package in the folder --packages was tuned
for, or one operation at those of --shapes. Beside the package's kernel stand the operation's
formula in eager PyTorch, the same compiled by Inductor, with and without max-autotune, one plain
Triton kernel (peers/plain_triton.py) with the fastest of its launches, and Flash-Linear-Attention's
gated norm, where it is installed. All are captured in CUDA graphs and take turns, in balanced
order; the floor is a torch.add over as many bytes.

The file is written after every shape; with --resume, shapes that it has are not measured again.
Exit code: 0 when every shape was measured, 1 when some are left, 2 for bad input.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch

from benchmarks.command import command_line, exit_code, say
from benchmarks.gpu import BLOCKS, ROUNDS, open_session, paired_ratio, take_turns
from benchmarks.harness import host_time, sentence
from benchmarks.peers.neighbours import Call, Results, contenders
from benchmarks.results import machine, module_facts
from benchmarks.shape_by_shape import measure_shapes
from generator.errors import NormforgeError
from generator.evaluate.gpu.rotation import ROTATION, copies
from generator.evaluate.gpu.timer import Timer
from generator.evaluate.verify.accuracy import compare_all
from generator.evaluate.verify.determinism import equal_bits
from generator.operations import operation_of
from generator.package.entries import problem_of
from generator.problem import Problem
from generator.shape_lists import load_problems
from normforge.operations import OPERATIONS
from normforge.table import TABLE, Table

OWN_BENCHMARKS = ("rmsnorm_backward", "layernorm_backward", "rmsnorm_invariant_backward")
"""Operations that `compare` measures beside more libraries, or others."""
LARGEST_ERROR = 0.05
"""||out - exact|| / ||exact|| beyond which a peer computes something else."""
RUNS = 5
"""Runs whose bits are compared."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = command_line(
        *(__doc__, "out"), shapes="tuned", seconds=540.0, device=0, condition=ROTATION
    )
    parser.add_argument("--packages", type=Path, required=True, help="the folder of packages")
    parser.add_argument("--ops", default="all", help="operations, or all that have a package there")
    parser.add_argument("--peers", default="all", help="names of contenders, or all")
    parser.add_argument("--resume", action="store_true", help="keep the rows that --out has")
    args = parser.parse_args(argv)
    return exit_code(__file__, lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Raises NormforgeError."""
    until = time.monotonic() + args.seconds
    problems = problems_of(args.packages, args.ops, args.shapes)
    session = open_session(args.device, args.condition)
    names = {problem.operation for problem in problems}
    packages = {name: module_facts(args.packages / name) for name in sorted(names)}
    harness = {"blocks": BLOCKS, "rounds": ROUNDS, "runs": RUNS}
    environment = {**machine(session.facts, timed=True), "packages": packages, "harness": harness}
    rows, left = measure_shapes(
        args,
        until,
        problems,
        {"environment": environment},
        lambda problem: measure(problem, args.packages, session.timer, args.peers),
        brief,
    )
    say(summary(rows))
    return 1 if left else 0


def problems_of(folder: Path, operations: str, shapes: str) -> list[Problem]:
    """Return the shapes to measure: those that packages of the folder were tuned for, or those that
    are named, of one operation. Raises NormforgeError for an operation without a package."""
    known = [name for name in OPERATIONS if (folder / name / TABLE).exists()]
    wanted = [name for name in known if name not in OWN_BENCHMARKS]
    if operations != "all":
        wanted = operations.split(",")
    if missing := sorted({*wanted} - {*known}):
        raise NormforgeError(f"{folder} has no package of {missing[0]}: tune it, or leave it out")
    if shapes != "tuned":
        if len(wanted) != 1:
            raise NormforgeError("--shapes is of one operation: name it with --ops")
        return load_problems(shapes, wanted[0])
    tables = (Table.load(folder / name) for name in wanted)
    return [problem_of(tuned) for table in tables for tuned in table.tuned]


def measure(problem: Problem, folder: Path, timer: Timer, peers: str = "all") -> dict[str, Any]:
    """Return a row of the results: for every contender µs of GPU and host, the ratio to the floor,
    its errors against float64, and whether its bits repeat; or why it has none."""
    torch.compiler.reset()
    torch.cuda.empty_cache()
    operation = operation_of(problem)
    inputs = operation.make_inputs(problem, timer.device)
    bounds = operation.bounds(problem, inputs)
    sets = copies(inputs, timer.sets(operation.traffic_bytes(problem)))
    cells: dict[str, dict[str, Any]] = {}
    calls: dict[str, list[Call]] = {}
    wanted = None if peers == "all" else {"ours", *peers.split(",")}
    with torch.no_grad():
        for name, make in contenders(problem, folder, inputs, timer).items():
            if wanted is not None and name not in wanted:
                continue
            try:
                bind = make()
                own = [bind(each) for each in sets]
                cells[name] = checked(own[0], bounds)
                timer.block([own], 1)
                calls[name] = own
            except Exception as error:
                cells[name] = {"reason": sentence(error)}
        del bounds
        floors = [operation.floor(problem, each, written(problem, each)) for each in sets]
        floor, *times = take_turns(timer, [floors, *calls.values()])
        for (name, own), found in zip(calls.items(), times, strict=True):
            ratio = paired_ratio(found, floor)
            cells[name] |= {"us": median(found), "ratio": ratio, "host_us": host_time(own[0])}
    return {"floor_us": median(floor), "sets": len(sets), "cells": cells}


def checked(call: Call, bounds: Any) -> dict[str, Any]:
    """Return the errors of a call and whether its bits repeat. Raises ValueError for outputs that
    are something else."""
    first = {name: out.clone() for name, out in call().items()}
    flat = {name: first[name].reshape(bound.reference.shape) for name, bound in bounds.items()}
    errors = compare_all(flat, bounds).errors
    if wrong := [name for name, e in errors.items() if not isfinite(e) or e > LARGEST_ERROR]:
        raise ValueError(f"{wrong[0]} is off by {errors[wrong[0]]:.2g} of itself")
    again = (call() for _ in range(RUNS - 1))
    same = all(equal_bits(run[name], first[name]) for run in again for name in first)
    return {"errors": errors, "same_bits": same}


def written(problem: Problem, inputs: Any) -> Results:
    """Return rows for the floor to write, where the operation writes such."""
    first = problem.signature.outputs[0]
    return {} if first.extra else {first.name: torch.empty_like(inputs.x)}


def brief(row: dict[str, Any]) -> str:
    """Say a row in one line."""
    cells = row["cells"].items()
    said = (
        f"{name} {cell['ratio']:.3f}" if "ratio" in cell else f"{name} -" for name, cell in cells
    )
    return f"{row['shape']} floor {row['floor_us']:.1f} us {' '.join(said)}"


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Return the geometric means over the floor, a line for each operation."""
    lines = []
    for operation in dict.fromkeys(row["shape"].partition(":")[0] for row in rows):
        own = [row["cells"] for row in rows if row["shape"].partition(":")[0] == operation]
        found = {
            name: [cells[name]["ratio"] for cells in own if "ratio" in cells.get(name, {})]
            for name in dict.fromkeys(name for cells in own for name in cells)
        }
        means = (f"{n} {geometric_mean(r):.3f} ({len(r)})" for n, r in found.items() if r)
        lines.append(f"{operation}: {', '.join(means)}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
