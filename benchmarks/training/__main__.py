"""Measure what a faster norm is worth in training: whole steps of transformer blocks, on one GPU.

    python -m benchmarks.training --out benchmarks/results/training_h100.json --seconds 540

A case is a model, a length of sequences, `eager`, `blocks` or `whole` (compiled block by block, or
as one graph) and, if wanted, checkpointing: `llama3_8b,4096,eager`. It runs in --processes
processes, one after another on each of --devices. In each, forward and backward of the same blocks
run on the same weights with PyTorch's norm and with all others, in turns; the first steps do not
count. Optimizer, embedding and head are left out. One contender is PyTorch's norm once more: it
shows the noise.

The results file is written after every process, and --resume goes on with it. A plot (.svg) comes
beside it; --render only draws that, and needs no GPU. Exit code: 0 when all cases were measured, 1
when --seconds left some or one failed, 2 for a file of another machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from benchmarks.command import command_line, exit_code, say
from benchmarks.gpu import open_session, target_of
from benchmarks.peers.peer import installed_version
from benchmarks.results import kept, machine, module_facts, write_json
from benchmarks.side_by_side import cores_of, devices_of, visible
from benchmarks.training.steps import BLOCKS, TOKENS, Case, measure
from benchmarks.training.summary import plot
from generator.errors import NormforgeError
from generator.paths import GENERATED
from normforge.table import FORWARD_TABLE, TABLE

CASES = (
    "llama3_8b,4096,eager",
    "qwen3_2b,4096,eager",
    "llama3_8b,4096,blocks",
    "qwen3_2b,4096,blocks",
    "llama3_8b,8192,eager",
    "qwen3_2b,8192,eager",
    "llama3_8b,4096,whole",
    "qwen3_2b,4096,whole",
    "qwen3_2b,4096,eager,checkpoint",
)
ENVIRONMENT = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""The environment of the processes: with it cuBLAS repeats its bits, which deterministic algorithms
ask for."""
PACKAGES = ("triton", "liger-kernel", "quack-kernels")
SAME = (
    "gpu",
    "commit",
    "driver",
    "torch",
    *PACKAGES,
    "tokens",
    "blocks",
    "rounds",
    "warmups",
    "kernels",
)
"""Keys of the facts that must not differ between the processes of one file. Each process has the
`uuid` of its GPU: all that is compared with each other ran in one process."""
OPERATIONS = ("rmsnorm_backward", "rmsnorm_invariant_backward")
"""Operations of the packages whose kernels take part."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = command_line(__doc__, out=None, seconds=3600.0)
    found.add_argument("--cases", default=";".join(CASES), help="separated by semicolons")
    found.add_argument("--processes", type=int, default=8, help="of each case")
    found.add_argument("--devices", default="0", help="indices of GPUs, such as 0,1,2,3")
    found.add_argument(
        "--rounds", type=int, default=10, help="least steps of each way in a process"
    )
    found.add_argument("--warmups", type=int, default=5, help="steps before, which do not count")
    found.add_argument("--resume", action="store_true", help="keep what --out has")
    found.add_argument("--render", action="store_true", help="only draw the plot of --out")
    found.add_argument("--one", help=argparse.SUPPRESS)  # a case, in this process
    found.add_argument("--process", type=int, default=0, help=argparse.SUPPRESS)
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    asked = parser()
    args = asked.parse_args(argv)
    try:
        cases = [Case.parse(text) for text in (args.one or args.cases).split(";")]
    except ValueError as error:
        asked.error(f"{error} is no case: MODEL,LENGTH,MODE[,checkpoint]")
    if args.one:
        print(json.dumps(measure(cases[0], args.rounds, args.warmups, args.process)))
        return 0
    if args.out is None:
        asked.error("--out is missing")
    return exit_code("training", lambda: measure_and_plot(cases, args))


def measure_and_plot(cases: list[Case], args: argparse.Namespace) -> int:
    """Raises NormforgeError."""
    if args.render and not args.out.exists():
        raise NormforgeError(f"{args.out} is not there: --render draws what a run has written")
    code = 0 if args.render else run(cases, args)
    if not args.out.exists():  # the first case failed
        return code
    say(plot(json.loads(args.out.read_text(encoding="utf-8")), args.out.with_suffix(".svg")))
    return code


def run(cases: list[Case], args: argparse.Namespace) -> int:
    """Measure what is missing; returns the exit code. Raises NormforgeError."""
    until = time.monotonic() + args.seconds
    devices = devices_of(args.devices)
    here = environment(args.rounds, args.warmups)
    former = kept(args.out, here, SAME) if args.resume else {}
    document: dict[str, Any] = {"environment": here, "cases": former.get("cases", {})}
    free: SimpleQueue[int] = SimpleQueue()
    for place in range(len(devices)):
        free.put(place)
    bad = set[Case]()

    def one(case: Case, number: int) -> dict[str, Any] | None:
        """Run a process on the next free GPU; None without time, or after one of its case
        failed."""
        place = free.get()
        try:
            if time.monotonic() > until or case in bad:
                return None
            line = [sys.executable, "-m", "benchmarks.training", "--one", str(case)]
            line += ["--rounds", str(args.rounds), "--warmups", str(args.warmups)]
            line += ["--process", str(number)]
            environment = {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": visible(devices[place])}
            pipe = subprocess.PIPE
            with subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True, env=environment) as it:
                os.sched_setaffinity(it.pid, cores_of(place, len(devices)))
                out, error = it.communicate()
            if it.returncode:
                bad.add(case)
                say(f"{case}: {error[-2000:]}")
                return None
            return dict(json.loads(out.splitlines()[-1]))
        finally:
            free.put(place)

    left, lost = 0, set[Case]()
    with ThreadPoolExecutor(len(devices)) as pool:
        began = time.monotonic()
        jobs = [
            (case, number, pool.submit(one, case, number))
            for case in cases
            for number in range(len(document["cases"].get(str(case), [])), args.processes)
        ]
        for case, number, job in jobs:
            found = job.result()
            if found is None:
                lost.add(case)
            if found is None or case in lost:  # also what ran beside it: numbers have no gaps
                left += 1
                continue
            document["cases"].setdefault(str(case), []).append(found)
            write_json(args.out, document)
            seconds = time.monotonic() - began
            print(f"{case}, process {number + 1}: after {seconds:.0f} s", flush=True)
    return 1 if left else 0


def environment(rounds: int, warmups: int) -> dict[str, Any]:
    """The GPU, the software, the packages and what all steps have in common."""
    versions = {name: installed_version(name) for name in PACKAGES}
    common = {"tokens": TOKENS, "blocks": BLOCKS, "dtype": "bf16"}
    common |= {"rounds": rounds, "warmups": warmups}
    session = open_session()
    gpu = target_of(session.facts).name
    packages = (GENERATED / gpu / operation for operation in OPERATIONS)
    kernels = {
        f"{package.name}/{table}": module_facts(package, table)["digest"]
        for package in packages
        for table in (TABLE, FORWARD_TABLE)
        if (package / table).exists()
    }
    return {**machine(session.facts), **versions, **common, "kernels": kernels}


if __name__ == "__main__":
    sys.exit(main())
