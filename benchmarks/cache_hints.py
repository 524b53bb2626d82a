"""Whether the load hint `evict_last` only moves cost to the kernels that run next.

    python -m benchmarks.cache_hints --out benchmarks/results/cache_hints_h200.json

Rows of x and dy that were read with that hint stay in the L2 for a while. For each shape the
winner of its study (before the finals the fastest config that may win) is compiled without and with
the hint; dx and dw must have the same bits. Then every follower is timed in one interval with what
it follows: the floor, `torch.add(x, dy, out=dx)`, and one of the two kernels, which take turns in
blocks of their own. If the hint's gain over the floor is left with a follower, nothing moved there.
Exit code: 2 for bad input or without the GPU of the studies.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.command import command_line, exit_code
from benchmarks.gpu import bench_of, open_gpu
from benchmarks.results import machine, write_json
from generator.errors import NormforgeError
from generator.evaluate.gpu.session import Workload
from generator.evaluate.gpu.timer import Operation, Timer
from generator.evaluate.verify.bench import Bench
from generator.evaluate.verify.determinism import digest
from generator.kernels.geometry import Config
from generator.paths import GENERATED
from generator.problem import Problem, load_problems
from generator.studies.reader import Study, read_studies
from generator.studies.storage import JOURNAL_NAME
from generator.target import Target, find_target

SHAPES = (
    "4096x256:bf16,4096x1024:bf16,4096x2048:bf16,8192x2048:bf16,32768x2048:bf16,16384x3072:bf16,"
    "4096x4096:bf16,16384x4096:bf16,4096x8192:bf16"
)
STUDIES = GENERATED / "h200" / f"{JOURNAL_NAME}.xz"
HINTS = ("default", "evict_last")
BLOCKS, ROUNDS = 3, 20


Extra = Mapping[str, torch.Tensor]
"""Tensors of followers beside dx, by name."""

FOLLOWERS: dict[str, Callable[[torch.Tensor, Extra], object]] = {
    "nothing": lambda dx, e: None,
    "torch.add(dx, r, out=o)": lambda dx, e: torch.add(dx, e["r"], out=e["o"]),
    "dx.add_(1.0)": lambda dx, e: dx.add_(1.0),
    "torch.mm(dx, w), w (N, N)": lambda dx, e: torch.mm(dx, e["square"], out=e["o"]),
    "torch.mm(dx, w), w (N, N/4)": lambda dx, e: torch.mm(dx, e["narrow"], out=e["part"]),
    "torch.add(r, r, out=o)": lambda dx, e: torch.add(e["r"], e["r"], out=e["o"]),
}
"""The last one does not touch dx."""


def make_extra(dx: torch.Tensor) -> Extra:
    """r and o are like dx, square is (N, N), narrow (N, N/4), and part what dx times that gives."""
    M, N = dx.shape
    square = torch.randn(N, N, device=dx.device).mul_(N**-0.5).to(dx.dtype)
    like = {"r": torch.randn_like(dx), "o": torch.empty_like(dx)}
    narrow = square[:, : N // 4].contiguous()
    return {**like, "square": square, "narrow": narrow, "part": dx.new_empty(M, N // 4)}


def read(where: str) -> list[Study]:
    """What read_studies gives; takes the path of a study file, too. Raises NormforgeError."""
    path = Path(where)
    return read_studies(path.parent if path.name.startswith(JOURNAL_NAME) else where)


def choose(studies: Iterable[Study], problem: Problem, gpu: str) -> dict[str, int | str]:
    """The winner's config, or else the fastest that may win, less its load hint. Raises
    NormforgeError."""
    own = [s for s in studies if (s.problem, s.gpu, s.evidence) == (problem, gpu, "measured")]
    if not own:
        raise NormforgeError(f"no study measured {problem} on {gpu}: tune it, or leave it out")
    fastest = sorted((r for s in own for r in s.ranked), key=lambda record: record.ratio)
    configs = [s.winner.config for s in own if s.winner] or [r.config for r in fastest]
    if not configs:
        raise NormforgeError(f"the study of {problem} has no config that may win: leave it out")
    return {knob: value for knob, value in configs[0].items() if knob != "load_hint"}


def load(workload: Workload, config: Config, hint: str, target: Target) -> Bench:
    """The kernel of a config with this load hint. Raises NormforgeError."""
    return bench_of(workload, {**config, "load_hint": hint}, target)


def check_bits(workload: Workload, benches: Mapping[str, Bench]) -> None:
    """Raise NormforgeError where dx or dw depends on the hint."""
    if len({digest(bench, workload.cancelling) for bench in benches.values()}) > 1:
        raise NormforgeError(f"{workload.problem}: dx or dw has other bits with another load hint")


def time_pair(timer: Timer, floor: Operation, kernel: Operation) -> list[float]:
    """µs of both, in blocks of their own."""
    blocks = [timer.block([floor, kernel], ROUNDS) for _ in range(BLOCKS)]
    return [round(median(map(median, times)), 2) for times in zip(*blocks, strict=True)]


def follow(timer: Timer, workload: Workload, benches: Mapping[str, Bench]) -> list[dict[str, Any]]:
    """Rows of a shape, µs of what is followed and the follower: `floor_us` of the blocks of either
    hint, in the order of HINTS, because clocks differ between blocks."""
    dx = workload.outputs["dx"].tensor
    extra = make_extra(dx)

    def before(follower: Callable[..., object], first: Operation) -> Operation:
        return lambda: (first(), follower(dx, extra))

    rows = []
    for name, follower in FOLLOWERS.items():
        floor = before(follower, workload.floor)
        kernels = [before(follower, partial(b.run, workload.inputs)) for b in benches.values()]
        pairs = [time_pair(timer, floor, kernel) for kernel in kernels]
        times = {f"{hint}_us": us for hint, (_, us) in zip(benches, pairs, strict=True)}
        rows.append({"follower": name, "floor_us": [us for us, _ in pairs], **times})
    return rows


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """µs over the floor without and with the hint, and what the hint gains."""
    lines = [f"{'':46}{'floor':>9}{'default':>12}{'evict_last':>12}{'gain':>8}"]
    for row in rows:
        default, hinted = (
            row[f"{hint}_us"] - us for hint, us in zip(HINTS, row["floor_us"], strict=True)
        )
        lines.append(
            f"{row['shape']:18}{row['follower']:28}{row['floor_us'][0]:9.2f}"
            f"{default:+12.2f}{hinted:+12.2f}{default - hinted:8.2f}"
        )
    return "\n".join(lines)


def measure(configs: Mapping[Problem, Config], target: Target) -> dict[str, Any]:
    """The document. Raises NormforgeError."""
    session, here = open_gpu(target.name)
    rows = []
    for problem, config in configs.items():
        workload = session.workload(problem)
        benches = {hint: load(workload, config, hint, here) for hint in HINTS}
        check_bits(workload, benches)
        known = {"shape": str(problem), "config": dict(config)}
        rows += [{**known, **row} for row in follow(session.timer, workload, benches)]
    return {"environment": machine(session.facts), "blocks": BLOCKS, "rounds": ROUNDS, "rows": rows}


def run(shapes: str, where: str, gpu: str, out: Path) -> int:
    """Raises NormforgeError."""
    problems, target = load_problems(shapes), find_target(gpu)
    studies = read(where)
    document = measure({p: choose(studies, p, target.name) for p in problems}, target)
    write_json(out, document)
    print(table(document["rows"]))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = command_line(__doc__, "out", shapes=SHAPES, gpu="h200")
    parser.add_argument("--studies", default=str(STUDIES), help="a study file, its folder, a URL")
    args = parser.parse_args(argv)
    return exit_code(__file__, lambda: run(args.shapes, args.studies, args.gpu, args.out))


if __name__ == "__main__":
    sys.exit(main())
