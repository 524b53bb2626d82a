#!/usr/bin/env python3
"""Set the forward kernels beside ATen's, Inductor's and QuACK's, and a copy, in one run.

    python benchmarks/forward.py --module generated/h200/rmsnorm_backward --shapes compare \
        --out benchmarks/results/forward_h200.json --seconds 540

Without --module the forwards of the shapes are tuned first, into a package in a temporary folder or
in --package. Every shape is timed as the backward is (cold L2, inside CUDA graphs, all in the same
blocks); host times are those of back-to-back calls. The file is written after every shape; shapes
that it has are not measured again with --resume.

Exit code: 0 when every shape was measured, 1 when some are left, 2 for bad input.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from math import exp, isfinite, log
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch.nn.functional import rms_norm  # noqa: E402

from benchmarks.harness import BLOCKS, ROUNDS, host_time, sentence  # noqa: E402
from benchmarks.results import write_json  # noqa: E402
from generator.errors import NormforgeError  # noqa: E402
from generator.evaluate.gpu.timer import Timer  # noqa: E402
from generator.operations.rmsnorm_forward import EPS, ForwardInputs, make_inputs  # noqa: E402
from generator.package.emit import emit_package  # noqa: E402
from generator.problem import Problem, load_problems  # noqa: E402
from generator.runtime.serve.forward import Forward, reference_forward  # noqa: E402
from generator.target import match_device  # noqa: E402
from generator.tuner.forward import tune_forwards  # noqa: E402

Call = Callable[[], Any]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="forward.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--module", type=Path, help="folder of the emitted package")
    found.add_argument("--package", type=Path, help="where to put the package tuned here")
    found.add_argument("--shapes", default="compare", help="as for tune.py")
    found.add_argument("--out", type=Path, required=True, help="the results file, .json")
    found.add_argument("--seconds", type=float, default=540.0, help="begin no shape after this")
    found.add_argument("--resume", action="store_true", help="keep the rows that --out has")
    found.add_argument("--device", type=int, default=0, help="index of the GPU")
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = parser().parse_args(argv)
    until = time.monotonic() + args.seconds
    try:
        if not torch.cuda.is_available():
            raise NormforgeError("a comparison needs a CUDA GPU, and PyTorch sees none")
        problems = load_problems(args.shapes)
        torch.cuda.set_device(args.device)
        with tempfile.TemporaryDirectory() as folder:
            module = args.module or tune(problems, args.package or Path(folder) / "package", args)
            return compare(problems, Forward(module), args, until)
    except NormforgeError as error:
        say(f"forward.py: {error}")
        return 2


def tune(problems: list[Problem], package: Path, args: argparse.Namespace) -> Path:
    """A package with the forwards of these shapes, measured now."""
    properties = torch.cuda.get_device_properties(args.device)
    target = match_device(properties.name, properties.multi_processor_count)
    if target is None:
        raise NormforgeError(f"search_spaces/gpus.yaml does not know a {properties.name}")
    processes = max(1, len(os.sched_getaffinity(0)) - 1)
    forwards = tune_forwards(problems, target, (args.device,), processes=processes, say=say)
    emit_package([], [], target, package, forwards)
    return package


def compare(
    problems: list[Problem], forward: Forward, args: argparse.Namespace, until: float
) -> int:
    """Measure what the results file lacks; returns the exit code."""
    rows: dict[str, Any] = {}
    if args.resume and args.out.exists():
        rows = {row["shape"]: row for row in json.loads(args.out.read_text())["rows"]}
    timer = Timer(torch.device("cuda", args.device))
    todo = [problem for problem in problems if str(problem) not in rows]
    longest = 0.0
    for done, problem in enumerate(todo):
        began = time.monotonic()
        if began + longest > until:
            say(f"{len(todo) - done} shapes are left: go on with --resume")
            return 1
        rows[str(problem)] = row = measure(problem, forward, timer)
        longest = max(longest, time.monotonic() - began)
        say(" ".join(f"{name} {value}" for name, value in brief(row).items()))
        write(args.out, list(rows.values()), args.device)
    say(summary(list(rows.values())))
    return 0


def contenders(forward: Forward, inputs: ForwardInputs) -> dict[str, Call]:
    """What is compared: each a call without arguments that gives (y, ...)."""
    x, weight, N = inputs.x, inputs.weight, inputs.x.shape[-1]
    found: dict[str, Call] = {
        "ours": lambda: forward(x, weight, EPS),
        "ours_residual": lambda: forward(x, weight, EPS, 0.0, inputs.residual),
    }
    if weight is not None and weight.dtype == x.dtype:
        found["aten"] = lambda: torch.ops.aten._fused_rms_norm(x, [N], weight, EPS)
    compiled = torch.compile(lambda x, w: (rms_norm(x, (N,), w, EPS),), dynamic=False)
    found["inductor"] = lambda: compiled(x, weight)
    try:
        from quack.rmsnorm import rmsnorm_fwd

        found["quack"] = lambda: rmsnorm_fwd(x, weight, eps=EPS, store_rstd=True)
    except ImportError:
        pass
    return found


def measure(problem: Problem, forward: Forward, timer: Timer) -> dict[str, Any]:
    """One row of the results: for every contender µs of GPU and host, and its error."""
    torch.compiler.reset()
    torch.cuda.empty_cache()
    inputs = make_inputs(replace(problem, residual=problem.dtype), timer.device)
    assert inputs.weight is not None
    out = torch.empty_like(inputs.x)
    cells: dict[str, dict[str, Any]] = {}
    calls: dict[str, Call] = {}
    with torch.no_grad():
        few = slice(0, min(problem.M, 4096))
        exact, _ = reference_forward(inputs.x[few].double(), inputs.weight.double(), EPS)
        for name, call in contenders(forward, inputs).items():
            try:
                y = call()[0]
                cells[name] = {}
                if name != "ours_residual":
                    error = (y[few].double() - exact).norm() / exact.norm()
                    if not isfinite(error):
                        raise ValueError("y has numbers that are not finite")
                    cells[name]["error_y"] = float(error)
                timer.block([call], 1)
                calls[name] = call
            except Exception as error:
                cells[name] = {"reason": sentence(error)}
        operations: list[Call] = [lambda: torch.mul(inputs.x, 1.5, out=out), *calls.values()]
        times: list[list[float]] = [[] for _ in operations]
        for _ in range(BLOCKS):
            for own, block in zip(times, timer.block(operations, ROUNDS), strict=True):
                own += block
        for (name, call), own in zip(calls.items(), times[1:], strict=True):
            ratio = median(t / f for t, f in zip(own, times[0], strict=True))
            cells[name] |= {"us": median(own), "ratio": ratio, "host_us": host_time(call)}
    facts = forward.explain(problem.M, problem.N, problem.dtype, problem.weight_dtype)
    return {"shape": str(problem), "copy_us": median(times[0]), **facts, "cells": cells}


def brief(row: dict[str, Any]) -> dict[str, str]:
    """A row in one line."""
    found = {row["shape"]: f"copy {row['copy_us']:.1f} us"}
    for name, cell in row["cells"].items():
        found[name] = f"{cell['ratio']:.3f}" if "ratio" in cell else "failed"
        if "host_us" in cell:
            found[name] += f" (host {cell['host_us']:.1f} us)"
    return found


def summary(rows: list[dict[str, Any]]) -> str:
    """Geometric means of the ratios to the copy."""
    parts = []
    for name in dict.fromkeys(name for row in rows for name in row["cells"]):
        ratios = [row["cells"][name]["ratio"] for row in rows if "ratio" in row["cells"][name]]
        if ratios:
            mean = exp(sum(map(log, ratios)) / len(ratios))
            parts.append(f"{name} {mean:.3f} ({len(ratios)} shapes)")
    return "Geometric mean of the ratio to a copy: " + ", ".join(parts)


def write(path: Path, rows: list[dict[str, Any]], device: int) -> None:
    """Write the results file, whole or not at all."""
    facts = {
        "gpu": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "harness": {"blocks": BLOCKS, "rounds": ROUNDS, "floor": "torch.mul(x, 1.5, out=y)"},
    }
    write_json(path, {"environment": facts, "rows": rows})


def say(text: str) -> None:
    """A line of progress, on standard error."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
