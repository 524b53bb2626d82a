"""Compare the kernels of a package for few rows, at tuned N and M that nobody tuned.

    python -m benchmarks.few_rows --module generated/h200/rmsnorm_backward \
        --out benchmarks/results/few_rows_h200.json

For every tuned N and dtype (without options) and every M of `--rows`: the floor, ATen's kernel, all
kernels that are tuned for this N, whatever their M, and all fallback kernels that serve it, in the
same blocks. A result names the kernel that the package chooses. The file is written after every
shape. Exit code: 1 where `--seconds` left shapes, 2 for bad input or without a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.command import command_line, exit_code
from benchmarks.gpu import open_session, package_in, paired_ratio, take_turns, target_of
from benchmarks.peers.pytorch import aten
from benchmarks.results import machine, module_facts
from benchmarks.shape_by_shape import measure_shapes
from generator.evaluate.gpu.protocol import Candidate
from generator.evaluate.gpu.rotation import ROTATION, Operation
from generator.evaluate.gpu.session import Session
from generator.problem import Problem
from normforge.api import Package
from normforge.table import Kernel, misfit

ROWS = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512)
ALIGNED = 16
"""Bytes of which the pointers of all tensors here are multiples."""


def problems(package: Package, rows: tuple[int, ...]) -> list[Problem]:
    """Every untuned M of `rows` at every tuned N, for weights of x's dtype and without options."""
    tuned = {(e.M, e.N, e.dtype) for e in package.table.tuned if e.dtype == e.weight_dtype}
    lengths = sorted({(N, dtype) for _, N, dtype in tuned})
    return [
        Problem(M, N, dtype, dtype)
        for N, dtype in lengths
        for M in rows
        if (M, N, dtype) not in tuned
    ]


def candidates(package: Package, problem: Problem) -> Iterator[tuple[str, Kernel]]:
    """Kernels of the package that can serve a problem, with how they are stored: "tuned" for the
    same N, or "fallback"."""
    wanted = (problem.dtype, problem.weight_dtype, False, "")
    seen: set[str] = set()
    for how, kernels in (
        ("tuned", (e.kernel for e in package.table.tuned if e.N == problem.N)),
        ("fallback", iter(package.table.fallback)),
    ):
        for kernel in kernels:
            spec = kernel.spec
            kind = (spec.dtype, spec.weight_dtype, spec.offset, spec.residual)
            fits = spec.least <= problem.N <= spec.N and kernel.file not in seen
            if kind == wanted and fits and not misfit(spec, problem.N, ALIGNED, ALIGNED):
                seen.add(kernel.file)
                yield how, kernel


def measure(folder: Path, package: Package, problem: Problem, session: Session) -> dict[str, Any]:
    """Return what the file says of a problem: the times of the floor and of ATen, µs, and of every
    kernel its ratio to the floor."""
    workload = session.workload(problem)
    found = list(candidates(package, problem))
    benches = [
        workload.bench(Candidate(kernel.read_cubin(folder), kernel.spec)) for _, kernel in found
    ]
    sets = session.timer.sets(workload.floor_bytes)
    operations: list[Operation] = [*workload.operations(benches, sets)]
    operations.append([aten(inputs) for inputs, _ in workload.sets(sets)])
    floor, *times, atens = take_turns(session.timer, operations)
    choice = package.table.choose(problem.M, problem.N, problem.dtype, problem.weight_dtype)
    return {
        "chosen": choice.kernel.file if choice.kernel else None,
        "sets": sets,
        "floor_us": round(median(floor), 3),
        "aten": round(paired_ratio(atens, floor), 4),
        "kernels": [
            {
                "kernel": kernel.file,
                "how": how,
                "strategy": kernel.spec.strategy,
                "ratio": round(paired_ratio(own, floor), 4),
            }
            for (how, kernel), own in zip(found, times, strict=True)
        ],
    }


def run(args: argparse.Namespace) -> int:
    """Raises NormforgeError."""
    until = time.monotonic() + args.seconds
    package = package_in(args.module)
    session = open_session(args.device, args.condition)
    target_of(session.facts, package.table.target["name"])
    _, left = measure_shapes(
        args,
        until,
        problems(package, tuple(args.rows)),
        {
            "environment": {
                **machine(session.facts, timed=True),
                "module": module_facts(args.module),
            }
        },
        lambda problem: measure(args.module, package, problem, session),
        line,
    )
    return 1 if left else 0


def line(row: dict[str, Any]) -> str:
    """Say a row in one line."""
    best = min(row["kernels"], key=lambda kernel: kernel["ratio"])
    return f"{row['shape']}: ATen {row['aten']}, best {best['ratio']} ({best['how']})"


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = command_line(
        __doc__, "module", "out", seconds=inf, device=0, condition=ROTATION, resume=False
    )
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="numbers of rows")
    return exit_code(__file__, lambda: run(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
