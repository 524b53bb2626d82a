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
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.command import command_line, exit_code, say
from benchmarks.gpu import open_gpu, open_session
from benchmarks.results import machine, write_json
from generator.errors import NormforgeError
from generator.evaluate.gpu.protocol import Candidate
from generator.evaluate.gpu.session import Session
from generator.evaluate.verify.bench import Bench
from generator.kernels.geometry import Config
from generator.kernels.nvrtc import compile_source
from generator.kernels.render import render
from generator.kernels.resource_gate import refuse
from generator.kernels.strategies import REDUCTION_KNOBS, determinism_class, strategy_of
from generator.kernels.variant import Variant, make_variant
from generator.problem import Problem
from generator.space.legal_configs import LegalConfigs
from generator.space.load import load_space, space_file
from generator.target import Target

PROBLEMS: dict[Problem, int] = {
    Problem.parse("2000x1024:bf16"): 1,
    Problem.parse("1500x8192:bf16"): 2,
    Problem.parse("700x16384:bf16"): 8,
    Problem(2000, 1024, "bf16", "bf16", operation="layernorm_backward"): 1,
    Problem(9000, 1024, "bf16", "bf16", operation="rmsnorm_invariant_backward"): 1,
}
"""Each with the CTAs of a cluster."""
PIPELINES = ("async", "bulk")
TOOLS = ("memcheck", "racecheck", "synccheck")
SANITIZED_ROWS = 300
"""Under compute-sanitizer, which is slow."""
CLEAN = re.compile(r"\b0 (errors|hazards)")
REPORT_LINES = 200
"""Of a tool that found something, kept with the results."""

DELAYED = re.compile(
    r"(DEVICE [^;{}]*?\b(?:send_words|receive_words|(?:load|store|add)_workspace\w*|load_acquire"
    r"|load_relaxed|store_release|store_relaxed|take_ticket|read_acquire|read_relaxed|book_\w+"
    r"|warp_barrier|cta_barrier|named_barrier|copy_async\w*|mbarrier_\w+|bulk_\w+|fence_\w+"
    r"|cluster_barrier|store_cluster|allow_dependents|wait_for_primary)\([^()]*\) \{)"
)
DELAY = r"""
DEVICE void delay() {
  unsigned r = static_cast<unsigned>(clock64()) ^ blockIdx.x * 2654435761u;
  r = (r ^ (r >> 15)) * 0x85ebca6bu;
  r ^= r >> 13;
  if ((r & 7) == 0) __nanosleep((r >> 3) & 2047);
}
"""
"""One call in eight sleeps, for up to 2 µs (twice that, as __nanosleep may)."""

CONTROLS: dict[str, tuple[Config, str, str]] = {
    "no barrier before the ticket": (
        {"strategy": "last_cta"},
        "    cta_barrier();\n    unsigned ticket",
        "    unsigned ticket",
    ),
    "slices summed when all have started, not arrived": (
        {"strategy": "column_slices"},
        "if (complete(seen)) return true;",
        "if (complete(seen) || starts(seen) == participants) return true;",
    ),
    "words of partial dw read once, not until they arrive": (
        {"strategy": "mailbox", "arrival": "early"},
        "} while (missing);",
        "} while (false);",
    ),
}
"""Bugs by name: in kernels with which knobs, and what becomes of which text."""


@dataclass(frozen=True)
class Kernel:
    """Compiled twice, as it is and with delays. planted: the bug that its delayed copy has."""

    problem: Problem
    strategy: str
    pipeline: str
    cluster: int
    plain: Candidate
    delayed: Candidate
    planted: str = ""

    @property
    def label(self) -> str:
        return f"{self.problem} {self.strategy} {self.pipeline} cluster {self.cluster}"


def with_delays(source: str) -> str:
    """A rendered source in which every primitive that orders something may sleep first. Raises
    NormforgeError for a source without them."""
    define = re.search(r"^#define DEVICE .*\n", source, re.M)
    delayed, count = DELAYED.subn(r"\1 delay();", source)
    if not define or not count:
        raise NormforgeError("the rendered source has no primitives to delay")
    return delayed.replace(define[0], define[0] + DELAY, 1)


def variants(target: Target, seed: int) -> Iterator[tuple[Variant, str]]:
    """A variant of every deterministic strategy, pipeline and problem, as far as there are any, and
    one for each control, with its name."""
    for problem, cluster in PROBLEMS.items():
        legal = LegalConfigs(load_space(space_file(problem.operation)), problem, target)
        kinds = [
            {name: kind[name] for name in REDUCTION_KNOBS}
            for kind in legal.reduction_kinds
            if determinism_class(kind) != "none"
        ]
        wanted: list[tuple[Config, str]] = [
            ({**kind, "pipeline": pipeline, "cluster": cluster}, "")
            for kind in kinds
            for pipeline in PIPELINES
        ]
        if problem == next(iter(PROBLEMS)):
            wanted += [({**knobs, "cluster": 1}, bug) for bug, (knobs, _, _) in CONTROLS.items()]
        for knobs, bug in wanted:
            rng = Random(f"{seed}/{problem}/{knobs}")
            try:
                config = legal.space.sample(problem, target, rng, knobs)
            except NormforgeError:  # there is none
                continue
            yield make_variant(config, problem), bug


def build(job: tuple[Variant, str], target: Target) -> Kernel | None:
    """The kernel of a variant, with a bug or "", None for one that must not run. Raises
    NormforgeError."""
    variant, bug = job
    problem = next(p for p in PROBLEMS if (p.operation, p.N) == (variant.operation, variant.N))
    source, cap = render(variant), int(variant["register_cap"])
    plain = compile_source(source, target.arch, cap)
    if refuse(variant, plain, problem, target):
        return None
    if bug:
        _, old, new = CONTROLS[bug]
        if old not in source:
            raise NormforgeError(f"the templates no longer have {old!r}")
        source = source.replace(old, new)
    delayed = compile_source(with_delays(source), target.arch, cap)
    if delayed.error:
        raise NormforgeError(f"{variant} does not compile with delays: {delayed.error[:500]}")
    spec = variant.spec(target.sms)
    return Kernel(
        problem,
        str(strategy_of(variant.config)),
        str(variant["pipeline"]),
        int(variant["cluster"]),
        Candidate(plain.cubin, spec),
        Candidate(delayed.cubin, spec),
        bug,
    )


def kernels(target: Target, seed: int) -> list[Kernel]:
    """All of them; a variant is drawn again where the first must not run."""
    found: dict[str, Kernel] = {}
    with ProcessPoolExecutor() as pool:
        for attempt in range(4):
            drawn = list(variants(target, seed + 1000 * attempt))
            for kernel in pool.map(partial(build, target=target), drawn):
                if kernel:
                    found.setdefault(kernel.label + kernel.planted, kernel)
    return list(found.values())


def disturb(session: Session, kernel: Kernel, launches: int) -> dict[str, Any]:
    """How many of so many launches, in pairs, gave other bits than the kernel without delays."""
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
                for name, out in bench.outputs.items():
                    count += torch.ne(out.inside, expected[name]).any()
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


def inside(path: Path) -> None:
    """What compute-sanitizer watches: two launches of each kernel."""
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
            command += ["--kernel-name", "kernel_substring=norm_"]
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
