"""Find the fastest layout of a fallback kernel, by the bytes of a vector and the bracket of N.

    python -m benchmarks.layouts --out benchmarks/results/layouts_h200.json

A group is a vector size and a bracket: rows of up to so many columns. Its candidates are `--draws`
layouts (half at random, half the best of eight times as many by the predictor), those of the
fallback kernels for it and for brackets near it, and one to compare with: the best of the next
narrower vectors. Those that may run are checked against float64 at 777 rows and timed at two N and
two M, in one block with the floor, `torch.add(x, dy, out=dx)`, and ATen's kernel. The file is
written after each group. Exit code: 1 where groups are left, 2 for bad input or without a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from contextlib import closing
from functools import partial
from operator import truediv
from statistics import geometric_mean, median
from typing import Any

from benchmarks.command import command_line, exit_code, say, spare_cores
from benchmarks.gpu import check_cuda, evaluate, paired_ratio, target_of
from benchmarks.layout_candidates import BRACKETS, COLUMNS, SIZES, Group, draw, known, layout_of
from benchmarks.peers import choose_peers
from benchmarks.results import machine, write_json
from generator.errors import ProblemError
from generator.evaluate.evaluator import Pool
from generator.evaluate.gpu.protocol import Answer, Candidate, Job, WorkerLostError
from generator.evaluate.gpu.rotation import Timed
from generator.evaluate.gpu.session import Session
from generator.evaluate.gpu.supervisor import Supervisor
from generator.evaluate.gpu.workload import Workload
from generator.kernels.compile_pool import CompilePool
from generator.kernels.nvrtc import Compiled
from generator.kernels.variant import Variant
from generator.package.fallback_kernels import fallback_variants, refuse_fallback
from generator.problem import ITEMSIZE
from generator.target import Target

CHECKED_ROWS = (777,)
ROUNDS = 9
KEPT = 2

Made = dict[str, tuple[Variant, Compiled]]
"""Compiled candidates by the id of their variant."""
Table = list[list[float]]


class LayoutSession(Session):
    """A worker's session that times ATen behind the candidates where it has a kernel: where the
    weight has x's dtype."""

    def _interleave(self, workload: Workload, job: Job) -> Answer:
        benches = [workload.bench(candidate) for candidate in job.candidates]
        operations: list[Timed] = [workload.floor]
        operations += [partial(bench.run, workload.inputs) for bench in benches]
        if job.problem.weight_dtype == job.problem.dtype:
            (aten,) = choose_peers("aten")
            operations.append(aten.load(self.timer)(workload.inputs))
        return Answer(block=self.timer.block(operations, ROUNDS))


def refusals(gpu: Supervisor, group: Group, made: Made, target: Target) -> dict[str, str]:
    """Return why candidates cannot be timed, by id: what the compiler and what the GPU says."""
    found: dict[str, str] = {}
    for name, (variant, compiled) in made.items():
        if refused := refuse_fallback(variant, compiled, target):
            found[name] = refused.note
    for problem in group.problems(CHECKED_ROWS):
        for name in made.keys() - found.keys():
            variant, compiled = made[name]
            candidate = Candidate(compiled.cubin, variant.spec(target.sms))
            result = evaluate(gpu, problem, candidate, "accuracy")
            if result.outcome != "ok":
                found[name] = f"{result.outcome}: {result.note}"
                say(f"{name}: {found[name]}")
    return found


def measure(gpu: Supervisor, group: Group, made: Made, target: Target) -> dict[str, Any]:
    """Return what the file says of a group. Raises WorkerLostError or ProblemError without
    times."""
    refused = refusals(gpu, group, made, target)
    usable = [pair for name, pair in made.items() if name not in refused]
    if not usable:
        raise ProblemError("no candidate may run")
    candidates = tuple(Candidate(c.cubin, v.spec(target.sms)) for v, c in usable)
    floors, ratios = [], []
    for problem in group.problems():
        block = gpu.call(Job("interleave", problem, candidates)).block or []
        floors.append(median(block[0]))
        ratios.append([paired_ratio(times, block[0]) for times in block[1:]])
    return summary(group, [v for v, _ in usable], floors, ratios, list(refused.values()))


def summary(
    group: Group, variants: list[Variant], floors: list[float], ratios: Table, refused: list[str]
) -> dict[str, Any]:
    """A group in the file. floors: µs of each problem; ratios: to the floor, of each problem for
    every variant, and of ATen where it was timed. mean: geometric, of a variant's ratios; worst:
    the largest ratio to the best variant at one problem; narrower: the best of the next narrower
    vectors; in_a_row: the best that does not add rows in blocks, where others do; refused: how many
    for each reason, up to its colon."""
    size = group.vector_bytes
    best = [min(row[: len(variants)]) for row in ratios]
    times = list(zip(*ratios, strict=True))
    ours, aten = times[: len(variants)], times[len(variants) :]
    rows = [
        {
            "vector_bytes": variant["vector_bytes"],
            "columns": variant.N,
            "layout": str(layout_of(variant)),
            **({} if variant.in_blocks else {"in_blocks": False}),
            "ratios": [round(ratio, 4) for ratio in its],
            "mean": round(geometric_mean(its), 4),
            "worst": round(max(map(truediv, its, best)), 4),
        }
        for variant, its in zip(variants, ours, strict=True)
    ]
    rows.sort(key=lambda row: row["mean"])
    narrower = [row for row in rows if row["vector_bytes"] < size]
    own = [row for row in rows if row["vector_bytes"] == size]
    in_a_row = [row for row in own if not row.get("in_blocks", True)]
    return {
        "vector_bytes": size,
        "columns": group.columns,
        "shapes": [str(problem) for problem in group.problems()],
        "floor_us": [round(us, 3) for us in floors],
        **({"aten": [round(ratio, 4) for ratio in aten[0]]} if aten else {}),
        "timed": len(rows),
        "refused": dict(Counter(reason.split(":")[0] for reason in refused)),
        "best": [row for row in own if row not in in_a_row][:KEPT],
        **({"in_a_row": in_a_row[0]} if in_a_row else {}),
        "narrower": narrower[0] if narrower else None,
    }


def run(args: argparse.Namespace, gpu: Supervisor, target: Target, pool: Pool, until: float) -> int:
    """Measure all groups, narrow vectors and large brackets first; how many were not. Raises
    NormforgeError when there is no working GPU any more."""
    sizes = [size for size in sorted(set(args.sizes)) if size >= ITEMSIZE[args.dtype]]
    groups = [
        Group(size, columns, args.dtype, args.weight_dtype)
        for size in sizes
        for columns in reversed(BRACKETS[size])
        if columns in args.columns
    ]
    ours = fallback_variants(target, [(args.dtype, args.weight_dtype or args.dtype)])
    futures = {}
    for group in groups:  # compiled while those before are timed
        variants = [*known(group, ours, target), *draw(group, target, args.draws, args.seed)]
        futures[group] = {v.id: (v, pool.submit(v)) for v in variants}
    document: dict[str, Any] = {"environment": machine(gpu.facts, timed=True), "dtype": args.dtype}
    document |= {"weight_dtype": args.weight_dtype} if args.weight_dtype else {}
    document |= {"groups": [], "left": []}
    winners: dict[tuple[int, int], Made] = {}
    for group in groups:
        size, columns = group.vector_bytes, group.columns
        try:
            if time.monotonic() > until:
                raise ProblemError("no time was left")
            made = {name: (v, pool.result(v, f)) for name, (v, f) in futures[group].items()}
            narrower = winners.get((size // 2, columns), {}).items()
            made |= {name: pair for name, pair in narrower if pair[0].least <= group.least}
            found = measure(gpu, group, made, target)
        except (WorkerLostError, ProblemError) as error:
            reason = {"vector_bytes": size, "columns": columns, "reason": str(error)}
            document["left"].append(reason)
            say(f"{group}: {error}")
        else:
            document["groups"].append(found)
            print(f"{group}: ATen {found.get('aten', 'has no kernel')}")
            for row in filter(None, (*found["best"], found.get("in_a_row"))):
                how = "" if row.get("in_blocks", True) else ", rows not in blocks"
                print(f"  {row['mean']:.3f} {row['ratios']} {row['layout']}{how}")
            best = [row["layout"] for row in found["best"][:1]]
            winners[size, columns] = {n: m for n, m in made.items() if str(layout_of(m[0])) in best}
        write_json(args.out, document)
    return len(document["left"])


def on_this_gpu(args: argparse.Namespace) -> int:
    """Raises NormforgeError."""
    until = time.monotonic() + args.seconds
    check_cuda()
    with closing(Supervisor(0, open_handler=LayoutSession)) as gpu:
        target = target_of(gpu.facts, args.gpu)
        with CompilePool(target.arch, spare_cores()) as pool:
            return 1 if run(args, gpu, target, pool, until) else 0


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = command_line(__doc__, "out", gpu="auto", seconds=540.0, seed=0)
    parser.add_argument("--dtype", choices=tuple(ITEMSIZE), default="bf16", help="of x")
    parser.add_argument("--weight-dtype", choices=("fp32",), default="", help="where not x's")
    parser.add_argument("--sizes", type=int, nargs="+", choices=SIZES, default=SIZES)
    parser.add_argument(
        "--columns", type=int, nargs="+", choices=COLUMNS, default=COLUMNS, help="brackets"
    )
    parser.add_argument("--draws", type=int, default=32, help="layouts of each group")
    args = parser.parse_args(argv)
    return exit_code(__file__, lambda: on_this_gpu(args))


if __name__ == "__main__":
    sys.exit(main())
