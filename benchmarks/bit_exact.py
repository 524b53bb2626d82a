"""Compare the outputs of sampled variants, GPU against CPU emulator, bit for bit.

    python -m benchmarks.bit_exact --out benchmarks/results/bit_exact_h200.json

Needs a GPU, its driver and a C++ compiler. Variants of an operation (--op) are drawn over all
strategies, dtypes, pipelines and clusters, and from the kernels for any N where its packages have
some, on even and odd shapes, with padded rows and unaligned bases for half of them. Both sides run
the same rendered source with the same launch on the same two sets of inputs. The strategies whose
CTAs add in any order get two participants: with two, every order gives the same sum.

Exit code 0 when every bit of every compared variant agrees.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from typing import Any

import torch

from benchmarks.bit_exact_cases import Case, draw_case
from benchmarks.command import command_line, exit_code
from benchmarks.gpu import open_gpu
from benchmarks.results import machine, write_json
from generator.emulate import Layout, Schedule, find_compiler, run_schedules
from generator.emulate.build import NO_COMPILER
from generator.emulate.check import small_launch
from generator.errors import NormforgeError
from generator.evaluate.gpu.session import Session
from generator.kernels.cubin_cache import compile_variant
from generator.kernels.nvrtc import nvrtc_version
from generator.kernels.render import render
from generator.operations.rows import run_rows
from generator.problem import RMSNORM_BACKWARD
from generator.target import Target
from normforge.launch.driver import LaunchError
from normforge.launch.loaded_kernel import LoadedKernel
from normforge.operations import signature_of
from normforge.spec import Launch

DEVICE = torch.device("cuda")


@dataclass
class Emulated:
    """The results of the emulator and of NVRTC for one case: the outputs by name for each set of
    inputs, or the reason why nothing can be compared."""

    case: Case
    results: list[dict[str, torch.Tensor]]
    cubin: bytes
    failure: str


def emulate_case(index: int, seed: int, target: Target, operation: str) -> Emulated:
    """Draw a case, compile it for both sides and run it on the CPU; in a worker process."""
    torch.set_num_threads(1)
    case = draw_case(index, seed, target, operation)
    compiled = compile_variant(case.variant, target.arch)
    if compiled.error:
        return Emulated(case, [], b"", f"does not compile: {compiled.error}")
    spec, launch = small_launch(case.variant, case.problem.M, case.participants)
    schedule = Schedule(index, min(launch.grid, 8))
    results = []
    source = render(case.variant)
    for inputs in case.inputs():
        runs = run_schedules(source, spec, launch, inputs, [schedule], layout=case.layout)
        if runs.faults:
            return Emulated(case, [], b"", runs.faults[0])
        results.append({name: result for name, (result,) in runs.results.items()})
    return Emulated(case, results, compiled.cubin, "")


def place(rows: torch.Tensor, pad: int, misaligned_bytes: int) -> torch.Tensor:
    """A copy of `rows` on the GPU with `pad` elements behind each row and a base that lies
    `misaligned_bytes` behind an aligned address."""
    M, N = rows.shape
    offset = misaligned_bytes // rows.element_size()
    flat = torch.empty(offset + M * (N + pad), dtype=rows.dtype, device=DEVICE)
    placed = flat[offset:].view(M, N + pad)[:, :N]
    placed.copy_(rows)
    return placed


def run_on_gpu(
    kernel: LoadedKernel,
    launch: Launch,
    inputs: Any,
    layout: Layout,
    like: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """The outputs from the GPU, by name, on the CPU; they and scratch are poisoned before. like:
    has their shapes and dtypes."""
    signature = signature_of(kernel.spec.operation)
    pads = layout.pads_of(signature)

    def put(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name in pads:
            return place(tensor, pads[name], layout.misaligned_bytes)
        return tensor.to(DEVICE)

    named = {tensor.name: getattr(inputs, tensor.name) for tensor in signature.inputs}
    given = {name: put(name, tensor) for name, tensor in named.items() if torch.is_tensor(tensor)}
    outputs = {name: put(name, torch.full_like(out, torch.nan)) for name, out in like.items()}
    workspace = torch.full((launch.workspace_bytes,), 0xFF, dtype=torch.uint8, device=DEVICE)
    workspace[: launch.scratch_offset] = 0
    run_rows(kernel, launch, replace(inputs, **given), outputs, workspace)
    torch.cuda.synchronize()
    if bool(workspace[: launch.scratch_offset].any()):
        name = kernel.spec.name
        raise NormforgeError(f"{name} left a counter or an accumulator changed on the GPU")
    return {name: out.cpu() for name, out in outputs.items()}


def first_difference(ours: torch.Tensor, theirs: torch.Tensor) -> str:
    """Return "" when all bits agree, else the first place that differs and both values."""
    view = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[ours.element_size()]
    different = ours.contiguous().view(view) != theirs.contiguous().view(view)
    if not bool(different.any()):
        return ""
    at = tuple(different.nonzero()[0].tolist())
    count = int(different.sum())
    return f"{list(at)}: CPU {float(ours[at])!r}, GPU {float(theirs[at])!r}; {count} differ"


def compare_case(emulated: Emulated) -> dict[str, Any]:
    """Return one row of the report. outcome: equal, different, skipped (the GPU cannot launch the
    variant) or failed (a side gave nothing to compare)."""
    case = emulated.case
    spec, launch = small_launch(case.variant, case.problem.M, case.participants)
    row: dict[str, Any] = {
        "variant": case.variant.id,
        "problem": str(case.problem),
        "config": dict(case.variant.config),
        "grid": launch.grid,
        "layout": asdict(case.layout),
    }
    if emulated.failure:
        return row | {"outcome": "failed", "why": emulated.failure}
    kernel = LoadedKernel(emulated.cubin, spec)
    for kind, inputs, expected in zip(
        ("ordinary", "cancelling"), case.inputs(), emulated.results, strict=True
    ):
        try:
            found = run_on_gpu(kernel, launch, inputs, case.layout, expected)
        except LaunchError as error:
            return row | {"outcome": "skipped", "why": str(error)}
        except NormforgeError as error:
            return row | {"outcome": "failed", "why": str(error)}
        for name, ours in expected.items():
            difference = first_difference(ours, found[name])
            if difference:
                return row | {"outcome": "different", "why": f"{kind} {name}{difference}"}
    return row | {"outcome": "equal"}


def environment(session: Session, target: Target, processes: int) -> dict[str, Any]:
    """Return the facts that the result depends on, and when it was made."""
    compiler = subprocess.run(
        [find_compiler() or "", "--version"], capture_output=True, text=True, check=True
    )
    return {
        **machine(session.facts),
        "arch": target.arch,
        "nvrtc": nvrtc_version(),
        "python": platform.python_version(),
        "cpu": platform.processor() or platform.machine(),
        "compiler": compiler.stdout.splitlines()[0],
        "processes": processes,
    }


def run(args: argparse.Namespace) -> int:
    """Raises NormforgeError."""
    if find_compiler() is None:
        raise NormforgeError(NO_COMPILER)
    session, target = open_gpu()
    started = time.perf_counter()
    rows: dict[int, dict[str, Any]] = {}
    with ProcessPoolExecutor(args.processes, get_context("spawn")) as pool:
        pending = [
            pool.submit(emulate_case, index, args.seed, target, args.op)
            for index in range(args.variants)
        ]
        for future in as_completed(pending):
            emulated = future.result()
            row = rows[emulated.case.index] = compare_case(emulated)
            if row["outcome"] != "equal":
                print(f"{row['outcome']}: {row['variant']} {row['problem']}: {row['why']}")
    outcomes = Counter(row["outcome"] for row in rows.values())
    report = {
        "what": "the outputs of the GPU and of the CPU emulator, compared bit for bit",
        "operation": args.op,
        "environment": environment(session, target, args.processes),
        "seed": args.seed,
        "seconds": round(time.perf_counter() - started, 1),
        "outcomes": dict(outcomes),
        "cases": [rows[index] for index in sorted(rows)],
    }
    write_json(args.out, report)
    summary = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    print(f"{summary} in {report['seconds']} s; written to {args.out}")
    return 0 if set(outcomes) <= {"equal", "skipped"} and outcomes["equal"] else 1


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = command_line(__doc__, "out", op=RMSNORM_BACKWARD, seed=1)
    parser.add_argument("--variants", type=int, default=450, help="to draw; a few may not launch")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(argv)
    return exit_code(__file__, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
