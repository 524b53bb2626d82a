"""Set the kernels of two packages side by side, such as those of this commit and of an earlier one.

    git worktree add ../earlier COMMIT
    python -m benchmarks.packages --module generated/h200/rmsnorm_backward \
        --before ../earlier/generated/h200/rmsnorm_backward --shapes compare --out packages.json

For every shape the kernels that the two packages choose are timed in the same blocks as the floor,
under each condition of generator/evaluate/gpu/rotation.py. Where both choose the same kernel, what
the two times differ by is noise. The packages may be of two operations with the same tensors, such
as RMSNorm's backward and the batch-invariant one, whose price this measures. The file is written
after every shape; a run that was stopped goes on with --resume. Exit code: 1 where --seconds left
shapes, 2 for bad input or without the packages' GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Mapping
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.command import command_line, exit_code
from benchmarks.comparison import operation_of_package
from benchmarks.goals import geometric_mean
from benchmarks.gpu import open_session, paired_ratio, take_turns, target_of
from benchmarks.results import machine, module_facts
from benchmarks.shape_by_shape import measure_shapes
from generator.errors import NormforgeError
from generator.evaluate.gpu.protocol import Candidate
from generator.evaluate.gpu.rotation import CONDITIONS
from generator.evaluate.gpu.session import Session
from generator.evaluate.gpu.timer import Timer
from generator.problem import Problem
from generator.shape_lists import load_problems
from normforge.operations import signature_of
from normforge.table import Kernel, Table

SIDES = ("before", "after")
BLOCKS = 5


def chosen(table: Table, problem: Problem) -> Kernel:
    """Return the kernel that a package chooses. Raises NormforgeError where it has none."""
    shape = (problem.M, problem.N, problem.dtype, problem.weight_dtype)
    options = ("offset", "residual", "rotation")
    choice = table.choose(*shape, **{name: getattr(problem, name) for name in options})
    if choice.kernel is None:
        raise NormforgeError(f"{problem}: a package has no kernel for it: {choice.reason}")
    return choice.kernel


def measure(
    session: Session,
    timers: Mapping[str, Timer],
    kernels: Mapping[Path, Kernel],
    problem: Problem,
) -> dict[str, Any]:
    """Return a row of the document. kernels: by the folder of their package, the earlier one
    first."""
    workload = session.workload(problem)
    benches = [
        workload.bench(Candidate(kernel.read_cubin(folder), kernel.spec))
        for folder, kernel in kernels.items()
    ]
    files = dict(zip(SIDES, (kernel.file for kernel in kernels.values()), strict=True))
    row: dict[str, Any] = {"kernels": files}
    for condition, timer in timers.items():
        sets = timer.sets(workload.floor_bytes)
        floor, before, after = take_turns(timer, workload.operations(benches, sets), BLOCKS)
        row[condition] = {
            "sets": sets,
            "floor_us": round(median(floor), 3),
            "before": round(paired_ratio(before, floor), 4),
            "after": round(paired_ratio(after, floor), 4),
            "after_over_before": round(paired_ratio(after, before), 4),
        }
    return row


def line(row: Mapping[str, Any]) -> str:
    """Say a row in one line."""
    parts = [f"{row['shape']:24}"]
    for condition in CONDITIONS:
        said = row[condition]
        parts.append(
            f"{condition}: {said['before']:.3f} -> {said['after']:.3f} of the floor "
            f"({said['after_over_before']:.3f})"
        )
    return "; ".join(parts)


def summary(rows: Iterable[Mapping[str, Any]]) -> str:
    """Say what all rows come to, a line for each condition."""
    rows, lines = [*rows], []
    if not rows:
        return "no shape was measured"
    for condition in CONDITIONS:
        known = [(row[condition], row["shape"]) for row in rows]
        slower = [
            f"{shape} {ratio:.3f}"
            for said, shape in known
            if (ratio := round(said["after_over_before"], 3)) > 1.01
        ]
        lines.append(
            f"{condition}: {len(known)} shapes, geometric means: "
            + ", ".join(
                f"{name.replace('_', ' ')} {geometric_mean(said[name] for said, _ in known):.4f}"
                for name in (*SIDES, "after_over_before")
            )
            + "; slower by more than 1 %: "
            + (", ".join(slower) or "none")
        )
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    """Raises NormforgeError."""
    until = time.monotonic() + args.seconds
    folders = dict(zip(SIDES, (args.before, args.module), strict=True))
    facts = {side: module_facts(folder) for side, folder in folders.items()}
    operation = operation_of_package(args.module)
    before = operation_of_package(args.before)
    if signature_of(before) != signature_of(operation):
        raise NormforgeError(
            f"{args.before} is a package of {before}, whose tensors are not those of {operation}: "
            "name a package of the same operation"
        )
    tables = {folder: Table.load(folder) for folder in folders.values()}
    problems = load_problems(args.shapes, operation)
    picked = {p: {folder: chosen(table, p) for folder, table in tables.items()} for p in problems}
    if len(tables) < len(SIDES):
        raise NormforgeError(f"{args.module} cannot be compared with itself: name another folder")
    session = open_session(args.device)
    target_of(session.facts, tables[args.module].target["name"])
    timers = {name: Timer(session.device, condition=name) for name in CONDITIONS}
    document = {
        "environment": {**machine(session.facts), **facts},
        "conditions": {name: timer.facts() for name, timer in timers.items()},
    }
    with torch.no_grad():
        rows, left = measure_shapes(
            args, until, problems, document, lambda p: measure(session, timers, picked[p], p), line
        )
    print(summary(rows))
    return 1 if left else 0


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = command_line(
        __doc__, "module", "out", shapes="compare", seconds=inf, device=0, resume=False
    )
    parser.add_argument("--before", type=Path, required=True, help="folder of the other package")
    return exit_code(__file__, lambda: run(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
