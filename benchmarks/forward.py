"""Set the forward kernels beside those of other libraries, and a copy, in one run.

    python -m benchmarks.forward --module generated/h200/rmsnorm_backward --shapes compare \
        --out benchmarks/results/forward_h200.json --seconds 540

Without --module the forwards of the shapes are tuned first, into a package in a temporary folder or
in --package. Every shape is timed as the backward is (cold L2, inside CUDA graphs, all in the same
blocks); host times are those of back-to-back calls. The file is written after every shape; with
--resume, which refuses another GPU, PyTorch or package, shapes that it has are not measured again.

Exit code: 0 when every shape was measured, 1 when some are left, 2 for bad input.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from math import isfinite
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch
from optuna.storages import InMemoryStorage
from torch.nn.functional import rms_norm

from benchmarks.command import command_line, exit_code, say, spare_cores
from benchmarks.gpu import BLOCKS, ROUNDS, open_gpu, paired_ratio, take_turns
from benchmarks.harness import host_time, sentence
from benchmarks.peers.cudnn_plans import cudnn_forward
from benchmarks.results import machine, module_facts
from benchmarks.shape_by_shape import measure_shapes
from generator.errors import NormforgeError
from generator.evaluate.gpu.evaluator import MeasuredEvaluator
from generator.evaluate.gpu.session import Session
from generator.evaluate.gpu.supervisor import Supervisor
from generator.evaluate.gpu.timer import Timer
from generator.kernels.compile_pool import CompilePool
from generator.kernels.variant import kernel_of
from generator.operations.rmsnorm_forward import EPS, ForwardInputs, make_inputs
from generator.package.emit import emit_package, read_forward_table
from generator.package.entries import Entry, Forwards
from generator.package.fallback_kernels import DTYPES
from generator.problem import RMSNORM_BACKWARD, RMSNORM_FORWARD, Problem
from generator.search.budget import FORWARD_TRIALS, Budget
from generator.search.search import search_problem
from generator.shape_lists import load_problems
from generator.space.forward_space import fallback_forwards
from generator.space.legal_configs import LegalConfigs
from generator.space.load import load_space, space_file
from generator.target import Target
from generator.tuner.display import describe
from generator.tuner.emission import provenance, usable_forwards
from normforge.serve.forward import Forward, reference_forward
from normforge.serve.kernels import source_of
from normforge.table import FORWARD_TABLE

Call = Callable[[], Any]

SAME = ("gpu", "uuid", "commit", "driver", "torch", "libraries", "module", "harness")
"""Facts that must not differ between the rows of one file. Of the module, its digest."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = command_line(
        *(__doc__, "out"), module=None, shapes="compare", seconds=540.0, device=0, resume=False
    )
    parser.add_argument("--package", type=Path, help="where to put the package tuned here")
    args = parser.parse_args(argv)
    return exit_code(__file__, lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Raises NormforgeError."""
    until = time.monotonic() + args.seconds
    if args.resume and not (args.module or args.package):
        raise NormforgeError("--resume needs the package of the rows: give --module or --package")
    problems = load_problems(args.shapes)
    session, target = open_gpu(device=args.device)
    with tempfile.TemporaryDirectory() as folder:
        module = args.module
        if module is None:
            module = args.package or Path(folder) / "package"
            tune_forwards(problems, target, args.device, module)
        return compare(problems, module, session, args, until)


def tune_forwards(problems: list[Problem], target: Target, device: int, module: Path) -> None:
    """Write a package with the forwards of these shapes that it lacks. Raises NormforgeError."""
    table = read_forward_table(module)
    has = {(t.M, t.N, t.dtype, t.weight_dtype) for t in table.tuned} if table else set()
    storage, found = InMemoryStorage(), []
    with (
        CompilePool(target.arch, spare_cores()) as pool,
        MeasuredEvaluator(target, Supervisor(device)) as evaluator,
    ):
        for shape in dict.fromkeys((p.M, p.N, p.dtype, p.weight_dtype) for p in problems):
            problem = Problem(*shape, operation=RMSNORM_FORWARD)
            legal = LegalConfigs(load_space(space_file(RMSNORM_FORWARD)), problem, target)
            budget = Budget(FORWARD_TRIALS["measured"])
            winner = None
            if shape not in has:
                winner = search_problem(legal, pool, evaluator, storage, budget)
            if winner is not None:
                variant = kernel_of(winner.config, problem)
                compiled = pool.result(variant, pool.submit(variant))
                facts = provenance(winner, storage)
                found.append(Entry(Problem(*shape), variant, compiled, "measured", facts))
                say(describe(problem, winner))
        rest = usable_forwards(fallback_forwards(DTYPES), target, pool)
    emit_package([], [], target, module, Forwards(tuple(found), rest))


def compare(
    problems: list[Problem],
    module: Path,
    session: Session,
    args: argparse.Namespace,
    until: float,
) -> int:
    """Measure what the results file lacks; returns the exit code."""
    forward = Forward(source_of(module, RMSNORM_BACKWARD))
    harness = {"blocks": BLOCKS, "rounds": ROUNDS, "floor": "torch.mul(x, 1.5, out=y)"}
    table = module_facts(module, FORWARD_TABLE)
    environment = {**machine(session.facts, timed=True), "module": table, "harness": harness}
    rows, left = measure_shapes(
        args,
        until,
        problems,
        {"environment": environment},
        lambda problem: measure(problem, forward, session.timer),
        lambda row: " ".join(f"{name} {value}" for name, value in brief(row).items()),
    )
    say(summary(rows))
    return 1 if left else 0


def contenders(
    forward: Forward, inputs: ForwardInputs, timer: Timer
) -> dict[str, Callable[[], Call]]:
    """Return what is compared. Each makes a call without arguments that gives (y, ...); it raises
    where its library is missing or does not serve the shape."""
    x, weight, N = inputs.x, inputs.weight, inputs.x.shape[-1]

    def aten() -> Call:
        if weight is None or weight.dtype != x.dtype:
            raise NormforgeError("ATen fuses only weights of x's dtype")
        return lambda: torch.ops.aten._fused_rms_norm(x, [N], weight, EPS)

    def inductor() -> Call:
        compiled = torch.compile(lambda x, w: (rms_norm(x, (N,), w, EPS),), dynamic=False)
        return lambda: compiled(x, weight)

    def liger() -> Call:
        from liger_kernel.ops.rms_norm import rms_norm_forward

        return lambda: rms_norm_forward(x, weight, EPS, 0.0, "llama", None)

    def quack() -> Call:
        from quack.rmsnorm import rmsnorm_fwd

        return lambda: rmsnorm_fwd(x, weight, eps=EPS, store_rstd=True)

    return {
        "ours": lambda: lambda: forward(x, weight, EPS),
        "ours_residual": lambda: lambda: forward(x, weight, EPS, 0.0, inputs.residual),
        "aten": aten,
        "inductor": inductor,
        "liger_triton": liger,
        "quack": quack,
        "cudnn": lambda: cudnn_forward(inputs, timer),
    }


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
        for name, make in contenders(forward, inputs, timer).items():
            try:
                call = make()
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
        floor, *times = take_turns(timer, operations)
        for (name, call), own in zip(calls.items(), times, strict=True):
            ratio = paired_ratio(own, floor)
            cells[name] |= {"us": median(own), "ratio": ratio, "host_us": host_time(call)}
    facts = choice_of(forward, problem)
    return {"shape": str(problem), "copy_us": median(floor), **facts, "cells": cells}


def choice_of(forward: Forward, problem: Problem) -> dict[str, Any]:
    """Return which kernel serves a shape, and why; None where there is none."""
    if forward.table is None:
        return {"how": "none", "kernel": None, "evidence": None}
    choice = forward.table.choose(problem.M, problem.N, problem.dtype, problem.weight_dtype)
    return {
        "how": choice.how,
        "kernel": choice.kernel.file if choice.kernel else None,
        "evidence": choice.tuned.evidence if choice.tuned else None,
    }


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
            parts.append(f"{name} {geometric_mean(ratios):.3f} ({len(ratios)} shapes)")
    return "Geometric mean of the ratio to a copy: " + ", ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
