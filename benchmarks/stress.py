"""Kernels of every strategy on a GPU with their timing disturbed, and under compute-sanitizer.

    python -m benchmarks.stress --out benchmarks/results/stress_h200.json

Delays: every primitive that orders memory or threads first sleeps, or not, for a time drawn from
the clock. Two copies of a kernel run at once on two streams, launch after launch, and every launch
has to give the bits of the kernel without delays. As a control, bugs are planted in the same way:
the delays have to show them. Sanitizer: the kernels without delays under memcheck, racecheck and
synccheck. Exit code: 1 for a fault or a control that was not noticed, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import command_line, exit_code, say
from benchmarks.gpu import open_gpu, open_session
from benchmarks.results import machine, write_json
from benchmarks.stress_kernels import Kernel, kernels
from generator.evaluate.gpu.session import Session
from generator.evaluate.verify.bench import Bench
from normforge.spec import SUM_KERNEL

TOOLS = ("memcheck", "racecheck", "synccheck")
SANITIZED_ROWS = 300
"""Rows under compute-sanitizer, which is slow."""
CLEAN = re.compile(r"\b0 (errors|hazards)")
REPORT_LINES = 200
"""Lines of a tool's report that are kept with the results, if it found something."""


def disturb(session: Session, kernel: Kernel, launches: int) -> dict[str, Any]:
    """Count how many of so many launches, in pairs, gave other bits than the kernel without
    delays."""
    workload = session.workload(kernel.problem)
    inputs = workload.cancelling
    plain = workload.bench(kernel.plain)
    plain.arm()
    plain.run(inputs)
    expected = plain.bits()
    torch.cuda.synchronize()
    runner = workload.bench(kernel.delayed).runner
    # Two that share nothing but the inputs.
    benches = [Bench(runner, workload.new_outputs(), workload.device) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in benches]
    wrong = [torch.zeros((), dtype=torch.int64, device=workload.device) for _ in benches]
    began = time.monotonic()
    for bench in benches:
        bench.arm()
    torch.cuda.synchronize()
    for _ in range(launches // len(benches)):
        for bench, stream, count in zip(benches, streams, wrong, strict=True):
            with torch.cuda.stream(stream):
                bench.poison()
                bench.run(inputs)
                outputs = bench.outputs.items()
                count += any_of([torch.ne(out.inside, expected[name]) for name, out in outputs])
    torch.cuda.synchronize()
    return {
        "shape": str(kernel.problem),
        "operation": kernel.problem.operation,
        "strategy": kernel.strategy,
        "pipeline": kernel.pipeline,
        "cluster": kernel.cluster,
        "planted": kernel.planted,
        "launches": launches // len(benches) * len(benches),
        "differing": int(sum(wrong)),
        "fault": "" if kernel.planted else "".join(bench.fault() for bench in benches),
        "seconds": round(time.monotonic() - began, 1),
    }


def any_of(different: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return 1 where any element of any tensor is true, without waiting for the GPU."""
    return torch.stack([each.any() for each in different]).any()


def inside(path: Path) -> None:
    """Run what compute-sanitizer watches: two launches of each kernel."""
    session = open_session()
    for kernel in pickle.loads(path.read_bytes()):
        print(f"========= {kernel.label}", flush=True)  # in the tool's report, before what it says
        workload = session.workload(replace(kernel.problem, M=SANITIZED_ROWS))
        bench = workload.bench(kernel.plain)
        bench.arm()
        for _ in range(2):
            bench.run(workload.cancelling)
        torch.cuda.synchronize()


def sanitize(
    found: Sequence[Kernel], seconds: float
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """The last line of each tool, and the reports of those that found something, by the tool."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        return dict.fromkeys(TOOLS, "compute-sanitizer is not installed"), {}
    said: dict[str, str] = {}
    reports: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels"
        path.write_bytes(pickle.dumps(list(found)))
        for tool in TOOLS:
            command = [program, "--tool", tool, "--report-api-errors", "no"]
            for part in ("norm_", SUM_KERNEL):
                command += ["--kernel-name", f"kernel_substring={part}"]
            command += [
                sys.executable,
                "-m",
                "benchmarks.stress",
                "--inside",
                str(path),
                "--out",
                os.devnull,
            ]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, check=False, timeout=seconds
                )
                lines = [x for x in done.stdout.splitlines() if x.startswith("=========")]
                said[tool] = " | ".join(x.strip("= ") for x in lines[-1:]) or done.stderr[-500:]
                if not CLEAN.search(said[tool]):
                    reports[tool] = lines[:REPORT_LINES]
                    say("\n".join([*lines[:40], done.stderr[-1500:]]))
            except subprocess.TimeoutExpired:
                said[tool] = f"stopped after {seconds:.0f} s"
    return said, reports


def run(args: argparse.Namespace) -> int:
    """Raises NormforgeError."""
    if args.inside:
        inside(args.inside)
        return 0
    session, target = open_gpu()
    found = kernels(target, args.seed)
    real = [kernel for kernel in found if not kernel.planted]
    document: dict[str, Any] = {"environment": machine(session.facts), "rows": []}
    for kernel in found:
        row = disturb(session, kernel, -(-args.launches // len(real)))
        document["rows"].append(row)
        print(kernel.label, kernel.planted, row["differing"], "of", row["launches"], flush=True)
        write_json(args.out, document)
    document["sanitizer"], document["sanitizer reports"] = sanitize(real, args.seconds)
    write_json(args.out, document)
    print(document["sanitizer"])
    bad = [row for row in document["rows"] if (row["differing"] > 0) != bool(row["planted"])]
    bad += [row for row in document["rows"] if row["fault"]]
    clean = all(map(CLEAN.search, document["sanitizer"].values()))
    return 0 if clean and not bad else 1


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = command_line(__doc__, "out", seed=0)
    parser.add_argument("--launches", type=int, default=100_000, help="in all, of real kernels")
    parser.add_argument("--seconds", type=float, default=300.0, help="for each sanitizer tool")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    return exit_code(__file__, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
