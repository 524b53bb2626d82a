#!/usr/bin/env python3
"""Set the emitted kernels beside every other implementation that is installed, in one run.

    python benchmarks/compare.py --module generated/h200/rmsnorm_backward --shapes compare \
        --peers all --out benchmarks/results/h200.json --seconds 540

The package says of which operation its kernels are; --op makes sure of it. Writes the results file
after every shape and, at the end, a page (.md) and a plot (.svg) beside it. A run that was
interrupted, or whose seconds were used up, goes on with --resume. Peers that tune themselves take
up to a minute per shape and run on the shapes of --tuned only. --render draws page and plot anew
from a results file, and needs no GPU.

Exit code: 0 when every shape was measured, 1 when some are left or ours failed on one, 2 for bad
input.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.comparison import (  # noqa: E402
    Comparison,
    Plan,
    describe,
    load_module,
    load_peers,
    operation_of_package,
    say,
    write_page,
)
from benchmarks.harness import sentence  # noqa: E402
from benchmarks.peers import choose_peers  # noqa: E402
from benchmarks.prepare import prepare  # noqa: E402
from benchmarks.report import missing_sentence  # noqa: E402
from benchmarks.results import Results  # noqa: E402
from generator.errors import NormforgeError  # noqa: E402
from generator.evaluate.gpu.session import Session  # noqa: E402
from generator.problem import SUMS, load_problems  # noqa: E402

TUNED = (
    "4096x256:bf16,4096x1024:bf16,16384x1024:bf16,65536x3072:bf16,4096x4096:bf16,"
    "16384x4096:bf16,65536x4096:bf16,16384x8192:bf16,65536x8192:bf16,4096x16384:bf16,"
    "16384x16384:bf16,4096x32768:bf16"
)
"""The default of --tuned: few widths, because a tuner compiles for each of them anew."""

PREPARE_SHARE = 0.4
"""Of the seconds: what compiling in advance may take."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="compare.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--module", type=Path, help="folder of the emitted package")
    found.add_argument("--op", choices=list(SUMS), help="of the package (default: read from it)")
    found.add_argument("--shapes", default="compare", help="as for tune.py")
    found.add_argument("--peers", default="all", help="all, or a comma-separated list")
    found.add_argument(
        "--tuned",
        default=TUNED,
        help="shapes on which peers that tune themselves run, as for --shapes, or none",
    )
    found.add_argument("--out", type=Path, required=True, help="the results file, .json")
    found.add_argument("--seconds", type=float, default=540.0, help="begin no shape after this")
    found.add_argument("--resume", action="store_true", help="keep the rows that --out has")
    found.add_argument("--render", action="store_true", help="only draw page and plot from --out")
    found.add_argument("--device", type=int, default=0, help="index of the GPU")
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = parser().parse_args(argv)
    try:
        if args.render:
            write_page(Results.read(args.out))
            return 0
        return compare(args)
    except NormforgeError as error:
        say(f"compare.py: {error}")
        return 2


def compare(args: argparse.Namespace) -> int:
    """Measure what --out lacks; returns the exit code."""
    until = time.monotonic() + args.seconds
    if args.module is None:
        raise NormforgeError("--module is missing: it names the folder of an emitted package")
    module = load_module(args.module)
    operation = operation_of_package(args.module, args.op)
    problems = load_problems(args.shapes, operation)
    tuned = [] if args.tuned == "none" else load_problems(args.tuned, operation)
    wanted = choose_peers(args.peers, operation)
    processes = max(1, len(os.sched_getaffinity(0)) - 1)
    _set_environment(processes)
    try:
        session = Session(args.device)
    except RuntimeError as error:
        raise NormforgeError(f"a comparison needs a CUDA GPU: {sentence(error)}") from error
    contenders, missing = load_peers(wanted, session.timer)
    say(missing_sentence(missing))
    peers = tuple(peer for peer in wanted if peer.name in contenders)
    plan = Plan(tuple(problems), frozenset(tuned), peers, until, operation)
    environment = describe(session.facts, peers, missing, args.module, operation)
    results = Results(args.out, environment)
    if args.resume:
        results = Results.resume(args.out, environment)
    results.write()
    tasks = [
        (peer, problem) for problem in plan.remaining(results) for peer in plan.peers_of(problem)
    ]
    prepare(tasks, processes, args.seconds * PREPARE_SHARE, args.device, say)
    comparison = Comparison(plan, contenders, module, session.timer)
    left = comparison.measure(results)
    comparison.record_paths(results)
    write_page(results)
    if left:
        say(f"{left} shapes are left: the same command with --resume measures them.")
    return 1 if left or any(row["ours_us"] is None for row in results.rows) else 0


def _set_environment(processes: int) -> None:
    """Variables that the peers' compilers read when they are imported, here and in the preparing
    processes: each of those compiles alone, and QuACK's tuner uses every core."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    os.environ.setdefault("QUACK_COMPILE_WORKERS", str(processes))


if __name__ == "__main__":
    sys.exit(main())
