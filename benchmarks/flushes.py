"""Measure how the ratio to the floor depends on the way in which the L2 is made cold.

    python -m benchmarks.flushes --out benchmarks/results/flushes_h200.json

The kernels of a package, compiled with their load hint and without, and peers take turns with the
floor, `torch.add(x, dy, out=dx)`, under every condition of `CONDITIONS`. dx and dw must have the
same bits with and without the hint. The file is written after each shape. Exit code: 1 where
--seconds left shapes, 2 for bad input or without the GPU of the package.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch

from benchmarks.command import command_line, exit_code, say
from benchmarks.comparison import load_peers
from benchmarks.gpu import bench_of, cubin_of, open_gpu, paired_ratio, take_turns
from benchmarks.peers import choose_peers
from benchmarks.peers.peer import Bind
from benchmarks.results import machine
from benchmarks.shape_by_shape import measure_shapes
from generator.errors import NormforgeError
from generator.evaluate.gpu.rotation import FLUSH, ROTATION, Timed
from generator.evaluate.gpu.session import Session
from generator.evaluate.gpu.timer import Timer
from generator.evaluate.gpu.workload import Workload
from generator.evaluate.verify.bench import Bench
from generator.evaluate.verify.determinism import digest
from generator.kernels.geometry import Config
from generator.operations.rmsnorm_backward import Inputs
from generator.package.known_winners import known_winners
from generator.paths import GENERATED
from generator.problem import Problem
from generator.shape_lists import load_problems
from generator.target import Target

PACKAGE = GENERATED / "h200" / "rmsnorm_backward"
HINTS = ("default", "evict_last")
PEER_SHAPES = (
    "4096x256:bf16,4096x1024:bf16,16384x1024:bf16,4096x4096:bf16,16384x3072:bf16,"
    "16384x4096:bf16,65536x4096:bf16,16384x8192:bf16,4096x16384:bf16,"
    "32768x3072:bf16,65536x3072:bf16,4096x8192:fp32,4096x16384:fp32"
)
READ_BYTES = 128 << 20
"""Bytes of plain reads: more than twice the L2 of an H200."""


class Condition(Timer):
    """The present flush: reads with the priority evict_last, then 256 MB of writes."""

    timed_under = FLUSH

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, condition=self.timed_under)
        self._clean = torch.zeros(READ_BYTES // 4, device=device)
        self._most = torch.empty((), device=device)

    def read_plainly(self) -> None:
        """Displace by ordinary reads, which leave clean lines."""
        torch.amax(self._clean, dim=0, out=self._most)

    def ending(self, operation: Timed) -> Timed:
        """The operation as it is timed."""
        return operation


class Writes(Condition):
    """256 MB of writes alone: the L2 is full of lines that have yet to be written to memory."""

    def prepare(self, value: float) -> None:
        self.cold.write(value)


class Clean(Condition):
    """The present flush, then 128 MB of plain reads: the L2 has nothing left to write."""

    def prepare(self, value: float) -> None:
        super().prepare(value)
        self.read_plainly()


class Rotating(Condition):
    """No flush: every operation takes the inputs and outputs that were used longest ago."""

    timed_under = ROTATION


class Drained(Condition):
    """The present flush, and 128 MB of plain reads inside the interval of every operation, the
    floor too: what it left in the L2 has to be written within its time."""

    def ending(self, operation: Timed) -> Timed:
        def drained() -> None:
            operation()
            self.read_plainly()

        return drained


CONDITIONS: dict[str, type[Condition]] = {
    "present": Condition,
    "writes": Writes,
    "clean": Clean,
    "rotating": Rotating,
    "drained": Drained,
}


def kernels_of(workload: Workload, config: Config, target: Target) -> dict[str, Bench]:
    """The kernel of a config by its load hint. Raises NormforgeError."""
    benches = {hint: bench_of(workload, {**config, "load_hint": hint}, target) for hint in HINTS}
    check_bits(workload, benches)
    return benches


def check_bits(workload: Workload, benches: Mapping[str, Bench]) -> None:
    """Raise NormforgeError where dx or dw depends on the hint."""
    if len({digest(bench, workload.cancelling) for bench in benches.values()}) > 1:
        raise NormforgeError(f"{workload.problem}: dx or dw has other bits with another load hint")


def operations(
    workload: Workload, benches: Mapping[str, Bench], peers: Mapping[str, Bind], number: int
) -> dict[str, list[Timed]]:
    """The floor first, by name: each with a call for each of `number` sets."""
    ours = workload.operations(list(benches.values()), number)
    found = dict(zip(("floor", *benches), ours, strict=True))
    sets = workload.sets(number)
    return found | {name: [bind(inputs) for inputs, _ in sets] for name, bind in peers.items()}


def measure(found: Mapping[str, Sequence[Timed]], timer: Condition) -> dict[str, Any]:
    """Medians over all rounds of each operation: `us`, and `over_floor`, its ratio to the floor;
    and through how many sets they rotated."""
    timed = [[timer.ending(call) for call in calls] for calls in found.values()]
    rounds = dict(zip(found, take_turns(timer, timed), strict=True))
    return {
        "sets": len(timed[0]),
        "us": {name: round(median(times), 2) for name, times in rounds.items()},
        "over_floor": {
            name: round(paired_ratio(times, rounds["floor"]), 4) for name, times in rounds.items()
        },
    }


def measure_shape(
    session: Session,
    timers: Mapping[str, Condition],
    problem: Problem,
    config: Config,
    target: Target,
    peers: Mapping[str, Bind],
) -> dict[str, Any]:
    """A row of the document. A peer that raises is left out. Raises NormforgeError."""
    workload = session.workload(problem)
    benches = kernels_of(workload, config, target)
    usable = {name: bind for name, bind in peers.items() if _serves(bind, workload.inputs)}
    cubins = {hint: cubin_of(problem, {**config, "load_hint": hint}, target) for hint in HINTS}
    row: dict[str, Any] = {"shape": str(problem), "hint": config["load_hint"], "cubins": cubins}
    for name, timer in timers.items():
        sets = timer.sets(workload.floor_bytes)
        row[name] = measure(operations(workload, benches, usable, sets), timer)
    return row


def _serves(bind: Bind, inputs: Inputs) -> bool:
    try:
        bind(inputs)()
        torch.cuda.synchronize()
    except Exception as error:
        say(f"a peer is left out: {error}")
        return False
    return True


def run(args: argparse.Namespace) -> int:
    """Raises NormforgeError."""
    until = time.monotonic() + args.seconds
    problems = load_problems(args.shapes)
    beside_peers = set(load_problems(args.peer_shapes))
    winners = {winner.problem: winner for winner in known_winners(args.module)}
    if absent := [str(problem) for problem in problems if problem not in winners]:
        raise NormforgeError(f"{args.module} has no winner for {', '.join(absent)}: leave them out")
    wanted = choose_peers(args.peers) if args.peers else []
    session, here = open_gpu(next(iter(winners.values())).target)
    peers, missing = load_peers(wanted, session.timer)
    if missing:
        raise NormforgeError(f"not installed: {', '.join(missing)}")
    if those := [name for name, peer in peers.items() if peer.overwrites_dy]:
        raise NormforgeError(
            f"{', '.join(those)} would overwrite dy, which all share: leave it out"
        )
    timers = {name: kind(session.device) for name, kind in CONDITIONS.items()}
    document: dict[str, Any] = {
        "environment": machine(session.facts),
        "conditions": {
            name: {"what": " ".join(str(kind.__doc__).split()), **timers[name].facts()}
            for name, kind in CONDITIONS.items()
        },
    }
    binds = {name: peer.bind for name, peer in peers.items()}

    def measure(problem: Problem) -> dict[str, Any]:
        beside = binds if problem in beside_peers else {}
        return measure_shape(session, timers, problem, winners[problem].config, here, beside)

    _, left = measure_shapes(args, until, problems, document, measure, line)
    return 1 if left else 0


def line(row: Mapping[str, Any]) -> str:
    """Ratios of the kernel as it is tuned."""
    ratios = (f"{name} {row[name]['over_floor'][row['hint']]:.3f}" for name in CONDITIONS)
    return f"{row['shape']:20}" + "  ".join(ratios)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = command_line(
        __doc__, "out", module=PACKAGE, shapes="compare", seconds=540.0, resume=False
    )
    parser.add_argument("--peers", default="cudnn", help="comma-separated, or '' for none")
    parser.add_argument("--peer-shapes", default=PEER_SHAPES, help="where the peers take part")
    args = parser.parse_args(argv)
    return exit_code(__file__, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
