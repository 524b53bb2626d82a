"""Set the emitted kernels beside every other implementation that is installed, in one run.

    python -m benchmarks.compare --module generated/h200/rmsnorm_backward --shapes compare \
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

from benchmarks.command import command_line, exit_code, say, spare_cores
from benchmarks.comparison import (
    Comparison,
    Plan,
    describe,
    load_module,
    load_peers,
    operation_of_package,
    write_page,
)
from benchmarks.gpu import open_session
from benchmarks.peers import choose_peers
from benchmarks.prepare import prepare
from benchmarks.report import missing_sentence
from benchmarks.results import Results
from generator.errors import NormforgeError
from generator.evaluate.gpu.rotation import FLUSH
from generator.shape_lists import load_problems

TUNED = (
    "4096x256:bf16,4096x1024:bf16,16384x1024:bf16,65536x3072:bf16,4096x4096:bf16,"
    "16384x4096:bf16,65536x4096:bf16,16384x8192:bf16,65536x8192:bf16,4096x16384:bf16,"
    "16384x16384:bf16,4096x32768:bf16"
)
"""The default of --tuned: few widths, because a tuner compiles for each of them anew."""

PREPARE_SHARE = 0.4
"""The share of the seconds that compiling in advance may take."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = command_line(
        __doc__,
        "out",
        module=None,
        op=None,
        shapes="compare",
        seconds=540.0,
        device=0,
        condition=FLUSH,
    )
    parser.add_argument("--peers", default="all", help="all, or a comma-separated list")
    parser.add_argument(
        "--tuned",
        default=TUNED,
        help="shapes on which peers that tune themselves run, as for --shapes, or none",
    )
    parser.add_argument("--resume", action="store_true", help="keep the rows that --out has")
    parser.add_argument("--render", action="store_true", help="only draw page and plot from --out")
    args = parser.parse_args(argv)
    return exit_code(__file__, lambda: render(args) if args.render else compare(args))


def render(args: argparse.Namespace) -> int:
    """Draw page and plot of --out."""
    write_page(Results.read(args.out))
    return 0


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
    processes = spare_cores()
    _set_environment(processes)
    session = open_session(args.device, args.condition)
    contenders, missing = load_peers(wanted, session.timer)
    say(missing_sentence(missing))
    peers = tuple(peer for peer in wanted if peer.name in contenders)
    plan = Plan(tuple(problems), frozenset(tuned), peers, until, operation)
    environment = describe(session.facts, session.timer, peers, missing, args.module, operation)
    results = Results(args.out, environment)
    if args.resume:
        results = Results.resume(args.out, environment)
        plan.check_resumed(results, missing)
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
    """Set the variables that the peers' compilers read when they are imported, here and in the
    preparing processes: each of those compiles alone, and QuACK's tuner uses every core."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    os.environ.setdefault("QUACK_COMPILE_WORKERS", str(processes))


if __name__ == "__main__":
    sys.exit(main())
