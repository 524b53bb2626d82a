"""Hardware counters of the module's kernels beside those of the floor, by Nsight Compute.

    python -m benchmarks.counters --module generated/h200/rmsnorm_backward \
        --shapes 4096x1024:bf16,16384x4096:bf16 --out benchmarks/results/counters_h200.json

For every shape: `torch.add(x, dy, out=dx)`, then the module's backward, each once with a cold L2
(flushed by ncu) and unlocked clocks. ncu runs one kernel at a time, so their times do not show what
two kernels gain by overlapping. Needs ncu in PATH and permission to read counters.
"""

from __future__ import annotations

import argparse
import csv
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.command import command_line, exit_code
from benchmarks.gpu import this_machine
from benchmarks.results import json_text, write_json
from generator.errors import NormforgeError
from generator.paths import REPOSITORY
from generator.problem import Problem
from generator.shape_lists import load_problems

METRICS = {
    "us": ("gpu__time_duration.sum", 1e-3),
    "dram_read_mb": ("dram__bytes_read.sum", 1e-6),
    "dram_write_mb": ("dram__bytes_write.sum", 1e-6),
    "dram_percent": ("dram__throughput.avg.pct_of_peak_sustained_elapsed", 1.0),
    "l2_percent": ("lts__throughput.avg.pct_of_peak_sustained_elapsed", 1.0),
    "issue_percent": ("smsp__issue_active.avg.pct_of_peak_sustained_active", 1.0),
    "warps_percent": ("sm__warps_active.avg.pct_of_peak_sustained_active", 1.0),
    "sm_active_min_percent": ("sm__cycles_active.min", 1.0),
    "sm_active_avg_percent": ("sm__cycles_active.avg", 1.0),
    "sm_active_max_percent": ("sm__cycles_active.max", 1.0),
    "sm_elapsed": ("sm__cycles_elapsed.max", 1.0),
}
"""Name here: ncu's metric (in its base units) and the factor to this one. The three of active
cycles become per cent of the kernel's cycles: how much of it the first and last SM worked."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = command_line(__doc__, "module", "shapes", out=None)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)

    def run_all() -> int:
        problems = load_problems(args.shapes)
        if args.inside:
            run(args.module, problems)
            return 0
        document = {
            "environment": this_machine(),
            "module": str(args.module),
            "rows": count(args.module, args.shapes, problems),
        }
        if args.out:
            write_json(args.out, document)
        else:
            print(json_text(document))
        return 0

    return exit_code(__file__, run_all)


def count(module: Path, shapes: str, problems: list[Problem]) -> list[dict[str, Any]]:
    """The counters of every kernel: one entry per shape, with lists `floor` and `ours`.

    Raises NormforgeError when ncu is missing or fails."""
    command = [
        "ncu",
        "--csv",
        "--page",
        "raw",
        "--print-units",
        "base",
        "--clock-control",
        "none",
        "--cache-control",
        "all",
        "--profile-from-start",
        "off",
        "--metrics",
        ",".join(metric for metric, _ in METRICS.values()),
        sys.executable,
        "-m",
        "benchmarks.counters",
        "--module",
        str(module.resolve()),
        "--shapes",
        shapes,
        "--inside",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    except FileNotFoundError:
        raise NormforgeError("ncu is not in PATH: install Nsight Compute") from None
    lines = done.stdout.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if done.returncode or start is None:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise NormforgeError(f"ncu failed: {' '.join(last)}")
    # The first row has the units.
    kernels = list(csv.DictReader(io.StringIO("\n".join(lines[start:]))))[1:]
    rows: list[dict[str, Any]] = []
    for kernel in map(read, kernels):
        if "_backward" not in kernel["kernel"] and "sum_partials" not in kernel["kernel"]:
            shape = str(problems[len(rows)])
            rows.append({"shape": shape, "floor": [kernel], "ours": []})
        else:
            rows[-1]["ours"].append(kernel)
    if len(rows) != len(problems):
        raise NormforgeError(f"ncu reported {len(rows)} of {len(problems)} shapes")
    return rows


def read(line: dict[str, str]) -> dict[str, Any]:
    """Read one kernel's counters from a line of ncu's table."""
    found: dict[str, Any] = {"kernel": line["Kernel Name"][:60]}
    for name, (metric, factor) in METRICS.items():
        found[name] = float(line[metric].replace(",", "")) * factor
    elapsed = found.pop("sm_elapsed")
    for name in ("sm_active_min_percent", "sm_active_avg_percent", "sm_active_max_percent"):
        found[name] *= 100 / elapsed
    return {name: round(v, 3) if isinstance(v, float) else v for name, v in found.items()}


def run(module: Path, problems: list[Problem]) -> None:
    """Run what ncu profiles: the floor and the module's call on every shape, each warmed up
    once."""
    import torch

    from generator.operations.rmsnorm_backward import make_inputs
    from normforge.api import Package

    package = Package(module)
    device = torch.device("cuda")
    for problem in problems:
        inputs = make_inputs(problem, device)
        dx = torch.empty_like(inputs.x)
        for watched in (False, True):
            if watched:
                torch.cuda.cudart().cudaProfilerStart()
            torch.add(inputs.x, inputs.dy, out=dx)
            package.rmsnorm_backward(inputs.dy, inputs.x, inputs.rstd, inputs.weight)
            torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


if __name__ == "__main__":
    sys.exit(main())
