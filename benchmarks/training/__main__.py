"""Measure what a faster norm is worth in training: whole steps of transformer blocks, on one GPU.

    python -m benchmarks.training --out benchmarks/results/training_h100.json --seconds 540

A case is a model, a length of sequences, `eager`, `blocks` or `whole` (compiled block by block, or
as one graph) and, if wanted, checkpointing: `llama3_8b,4096,eager`. It runs in --processes
processes, one after another. In each, forward and backward of the same blocks run on the same
weights with PyTorch's norm and with all others, in turns; the first steps do not count. Optimizer,
embedding and head are left out. One contender is PyTorch's norm once more: it shows the noise.

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
from typing import Any

from benchmarks.command import command_line, exit_code, say
from benchmarks.gpu import open_session, target_of
from benchmarks.peers.peer import installed_version
from benchmarks.results import kept, machine, module_facts, write_json
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
    "qwen3_2b,8192,eager",
    "qwen3_2b,4096,eager,checkpoint",
    "qwen3_2b,4096,whole",
    "llama3_8b,8192,eager",
)
ENVIRONMENT = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""The environment of the processes: with it cuBLAS repeats its bits, which deterministic algorithms
ask for."""
PACKAGES = ("triton", "liger-kernel", "quack-kernels")
SAME = (
    "gpu",
    "uuid",
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
"""Keys of the facts that must not differ between the processes of one file."""
OPERATIONS = ("rmsnorm_backward", "rmsnorm_invariant_backward")
"""Operations of the packages whose kernels take part."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = command_line(__doc__, out=None, seconds=3600.0)
    found.add_argument("--cases", default=";".join(CASES), help="separated by semicolons")
    found.add_argument("--processes", type=int, default=3, help="of each case")
    found.add_argument(
        "--rounds", type=int, default=20, help="least steps of each way in a process"
    )
    found.add_argument("--warmups", type=int, default=10, help="steps before, which do not count")
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
    here = environment(args.rounds, args.warmups)
    former = kept(args.out, here, SAME) if args.resume else {}
    document: dict[str, Any] = {"environment": here, "cases": former.get("cases", {})}
    left = 0
    for case in cases:
        found = document["cases"].setdefault(str(case), [])
        for number in range(len(found), args.processes):
            if time.monotonic() > until:
                left += 1
                continue
            began = time.monotonic()
            one = [sys.executable, "-m", "benchmarks.training", "--one", str(case)]
            one += ["--rounds", str(args.rounds), "--warmups", str(args.warmups)]
            one += ["--process", str(number)]
            done = subprocess.run(one, capture_output=True, text=True, check=False, env=ENVIRONMENT)
            if done.returncode:
                say(f"{case}: {done.stderr[-2000:]}")
                left += 1
                break
            found.append(json.loads(done.stdout.splitlines()[-1]))
            write_json(args.out, document)
            print(f"{case}, process {number + 1}: {time.monotonic() - began:.0f} s", flush=True)
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
