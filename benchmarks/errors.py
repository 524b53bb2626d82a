"""Errors of dx and dw on random normal rows against float64: a module's beside PyTorch's.

    python -m benchmarks.errors --module generated/h200/rmsnorm_backward --random 40 \
        --out benchmarks/results/errors_h200.json

PyTorch's are ATen's fused operator (where the weight has x's dtype) and the composite, its own
decomposition of that operator run one operation after another; all three are given the same rstd.
An error is ||out - exact|| / ||exact|| over all elements of several draws. With `--dw fp32` dw is
asked for in fp32 (`dw_out`) and not rounded to the weight's dtype, which ATen cannot.

Takes `--shapes`, and `--random` shapes of every pair of dtypes. Needs a GPU, or with --emulator a
C++ compiler: then the module's kernels run in generator/emulate, which gives the GPU's bits, with
the grids of their GPU, and PyTorch on the CPU, where it has the composite only. Exit code: 2 for
bad input.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import ceil, sqrt
from typing import Any

import torch

from benchmarks.command import command_line, exit_code
from benchmarks.comparison import load_module
from benchmarks.gpu import open_session
from benchmarks.peers.libraries import EPS
from benchmarks.peers.peer import Bind, Gradients
from benchmarks.peers.pytorch import aten, decomposed_backward
from benchmarks.results import OURS, machine, write_json
from benchmarks.untuned import log_uniform
from generator.emulate import Schedule, find_compiler, run_schedules
from generator.emulate.run import CallOptions
from generator.errors import NormforgeError
from generator.kernels.code_digest import compiler_input
from generator.operations.operation import TORCH_DTYPE
from generator.operations.rmsnorm_backward import Inputs, make_reference
from generator.package.fallback_kernels import DTYPES
from generator.package.sources import variant_of
from generator.problem import Problem
from generator.shape_lists import load_problems
from normforge.launch.kernel_arguments import DW_IN_FP32, DW_IN_WEIGHT_DTYPE
from normforge.spec import KernelSpec, Launch, plan_launch
from normforge.table import Table

ELEMENTS = 1 << 27
"""The most elements of a random shape, by default."""
ENOUGH, MOST = 16384, 16
"""Elements of dw to draw, and draws."""

Errors = dict[str, dict[str, float]]
"""Errors by implementation and by result."""


def random_shapes(count: int, seed: int, elements: int = ELEMENTS) -> list[Problem]:
    """`count` shapes of every pair of dtypes, log-uniform: M from 1 to 100,000 and N from 8 to
    12,288, two in three of them multiples of 64."""
    rng = random.Random(seed)

    found: list[Problem] = []
    for dtype, weight_dtype in DTYPES:
        for index in range(count):
            N = log_uniform(rng, 8, 12288)
            N = N if index % 3 == 0 else max(64, N // 64 * 64)
            M = min(log_uniform(rng, 1, 100_000), elements // N)
            found.append(Problem(M, N, dtype, weight_dtype))
    return found


def normal_inputs(problem: Problem, device: torch.device, seed: int) -> Inputs:
    """Independent normal x and dy, a weight around 1."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype, weight_dtype = TORCH_DTYPE[problem.dtype], TORCH_DTYPE[problem.weight_dtype]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    x, dy = (normal(problem.M, problem.N).to(dtype) for _ in range(2))
    rstd = torch.rsqrt(x.float().square().mean(-1) + EPS)
    return Inputs(x, dy, rstd, (1 + 0.1 * normal(problem.N)).to(weight_dtype))


def composite(inputs: Inputs) -> Callable[[], Gradients]:
    """Compute the gradients by PyTorch's operations, one after another."""
    return partial(decomposed_backward, inputs.dy, inputs.x, inputs.rstd, inputs.weight)


def in_fp32(bind: Bind) -> Bind:
    """Return the binding for a weight of equal values in fp32, and so for dw in fp32."""
    return lambda inputs: bind(replace(inputs, weight=inputs.weight.float()))


def of_module(module: Any, dw_in_fp32: bool) -> Bind:
    """A package's kernels, called as a training framework does."""

    def run(inputs: Inputs) -> Gradients:
        dw_out = torch.empty_like(inputs.weight, dtype=torch.float32) if dw_in_fp32 else None
        return module.rmsnorm_backward(
            inputs.dy, inputs.x, inputs.rstd, inputs.weight, dw_out=dw_out
        )

    return lambda inputs: partial(run, inputs)


def in_emulator(table: Table, dw_in_fp32: bool) -> Bind:
    """The kernels of a package on the CPU, launched as on its GPU."""

    def bind(inputs: Inputs) -> Callable[[], Gradients]:
        names = {dtype: name for name, dtype in TORCH_DTYPE.items()}
        M, N = inputs.x.shape
        kernel = table.choose(M, N, names[inputs.x.dtype], names[inputs.weight.dtype]).kernel
        if kernel is None:
            raise RuntimeError("no kernel of the package serves this")
        source, _ = compiler_input(variant_of(kernel))
        return executed(source, kernel.spec, plan_launch(kernel.spec, M), dw_in_fp32)(inputs)

    return bind


def executed(source: str, spec: KernelSpec, launch: Launch, dw_in_fp32: bool = False) -> Bind:
    """Execute one kernel on the CPU. A call raises NormforgeError where the emulator finds a
    fault."""
    call_options = CallOptions(dw_mode=DW_IN_FP32 if dw_in_fp32 else DW_IN_WEIGHT_DTYPE)

    def run(inputs: Inputs) -> Gradients:
        schedules = [Schedule(0, launch.grid)]
        runs = run_schedules(source, spec, launch, inputs, schedules, call_options=call_options)
        if runs.faults:
            raise NormforgeError(f"{spec.name} at {len(inputs.x)} rows: {runs.faults[0]}")
        return runs.results["dx"][0], runs.results["dw"][0]

    return lambda inputs: partial(run, inputs)


def errors(problem: Problem, calls: Mapping[str, Bind], device: torch.device) -> Errors:
    """Measure the errors of every implementation; those that do not take the problem are left
    out."""
    wrong: dict[str, list[float]] = {name: [0.0, 0.0] for name in calls}
    whole = [0.0, 0.0]
    for seed in range(max(2, min(MOST, ceil(ENOUGH / problem.N)))):
        inputs = normal_inputs(problem, device, seed)
        reference = make_reference(problem, inputs)
        exact = [reference.outputs[name] for name in ("dx", "dw")]
        whole = [sum_ + _squares(truth) for sum_, truth in zip(whole, exact, strict=True)]
        for name in list(wrong):
            try:
                results = calls[name](inputs)()
            except (RuntimeError, NotImplementedError):  # ATen: other dtypes, other devices
                del wrong[name]
                continue
            for i, (result, truth) in enumerate(zip(results, exact, strict=True)):
                wrong[name][i] += _squares(result.to(truth.dtype) - truth)
    return {
        name: {
            what: sqrt(part / total)
            for what, part, total in zip(("dx", "dw"), parts, whole, strict=True)
        }
        for name, parts in wrong.items()
    }


def _squares(tensor: torch.Tensor) -> float:
    return sum(float(part.double().square().sum()) for part in tensor.split(1 << 14))


def row(problem: Problem, found: Errors, facts: Mapping[str, Any]) -> dict[str, Any]:
    """facts: what the module's `explain` says about the problem."""
    ours = found[OURS]
    ratios = {
        name: {what: round(ours[what] / other[what], 3) if other[what] else None for what in ours}
        for name, other in found.items()
        if name != OURS
    }
    return {
        "shape": str(problem),
        "how": facts["how"],
        "kernel": facts.get("kernel"),
        "errors": found,
        "ours over": ratios,
    }


def worst(rows: Sequence[Mapping[str, Any]]) -> str:
    """Describe for every pair of dtypes the largest ratio of ours to each of the others, and where
    it is."""
    lines = []
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for each in rows:
        kinds.setdefault(each["shape"].split(":", 1)[1], []).append(each)
    for (kind, some), other, what in product(kinds.items(), ("aten", "composite"), ("dx", "dw")):
        ratios = [(r["ours over"].get(other, {}).get(what), r["shape"]) for r in some]
        known = [(ratio, shape) for ratio, shape in ratios if ratio is not None]
        if known:
            most, where = max(known)
            above = sum(ratio > 1.1 for ratio, _ in known)
            lines.append(
                f"{kind:12}{what} / {other:10} at most {most:.3f} ({where}), "
                f"above 1.1 at {above} of {len(known)}"
            )
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    """Raises NormforgeError."""
    problems = [] if args.shapes == "none" else load_problems(args.shapes)
    problems += random_shapes(args.random, args.seed, args.elements)
    module = load_module(args.module)
    dw_in_fp32 = args.dw == "fp32"
    calls: dict[str, Bind] = {"aten": aten, "composite": composite}
    if dw_in_fp32:
        calls = {"composite": in_fp32(composite)}
    if args.emulator:
        if find_compiler() is None:
            raise NormforgeError("--emulator needs a C++ compiler, and none was found")
        device, table = torch.device("cpu"), Table.load(args.module)
        calls[OURS] = in_emulator(table, dw_in_fp32)
        emulator = f"CPU, grids of {table.target['title']}"
        environment = {"emulator": emulator, "torch": torch.__version__}
    else:
        session = open_session()
        device, environment = session.device, machine(session.facts)
        calls[OURS] = of_module(module, dw_in_fp32)
    rows = []
    for problem in problems:
        with torch.no_grad():
            found = errors(problem, calls, device)
        if OURS in found:
            said = module.explain(problem.M, problem.N, problem.dtype, problem.weight_dtype)
            rows.append(row(problem, found, said))
            write_json(args.out, {"environment": environment, "dw": args.dw, "rows": rows})
    print(worst(rows))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = command_line(__doc__, "module", "out", shapes="compare", seed=0)
    parser.add_argument("--random", type=int, default=20, help="shapes of every pair of dtypes")
    parser.add_argument("--elements", type=int, default=ELEMENTS, help="of the largest of them")
    parser.add_argument("--dw", choices=("weight", "fp32"), default="weight", help="its dtype")
    parser.add_argument("--emulator", action="store_true", help="run the kernels on the CPU")
    args = parser.parse_args(argv)
    return exit_code(__file__, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
