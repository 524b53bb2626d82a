"""Measure what kernels with a producer gain: many configs of the search space beside the kernel
that the package has for the shape.

    python -m benchmarks.pipelines --out pipelines.json [--shapes SHAPES] [--configs 170]

The configs are drawn evenly over the families (generator/space/family.py) and numbers of teams that
the window rule leaves, with 0.9 to 3.2 MB of one tensor under way. Each is checked against float64
and for equal bits in five runs, and timed in one block beside the floor. The six fastest and the
package's kernel are then timed in the same blocks, under each condition of
generator/evaluate/gpu/rotation.py. No search chose them, and one may find faster ones. Exit code: 1
where --seconds left shapes, 2 for bad input or without a GPU that has a package.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.command import command_line, exit_code, spare_cores
from benchmarks.gpu import bench_of, cubin_of, open_session, paired_ratio, target_of
from benchmarks.results import machine
from benchmarks.shape_by_shape import measure_shapes
from generator.errors import NormforgeError
from generator.evaluate.gpu.protocol import Candidate
from generator.evaluate.gpu.rotation import CONDITIONS, FLUSH
from generator.evaluate.gpu.session import SEARCH_ROUNDS, Session
from generator.evaluate.gpu.timer import Timer
from generator.evaluate.verify.accuracy import check_accuracy
from generator.evaluate.verify.bench import Bench
from generator.evaluate.verify.determinism import check_repeats
from generator.kernels.cubin_cache import compile_variant
from generator.kernels.geometry import Config
from generator.kernels.variant import make_variant
from generator.paths import results_of
from generator.problem import Problem, load_problems
from generator.space.expressions import Names
from generator.space.family import family_of
from generator.space.legal_configs import LegalConfigs
from generator.space.load import load_space
from generator.target import Target
from normforge.table import Kernel, Table

SHAPES = (
    "4096x4096:bf16,65536x4096:bf16,16384x16384:bf16,16384x4096:bf16,4096x8192:fp32,"
    "65536x8192:bf16,4096x8192:bf16,16384x3072:bf16,24576x7168:fp32,32768x4096:bf16,"
    "65536x2048:bf16,16384x1024:bf16"
)
OF_FAMILY = 6
"""Configs of one family with as many teams, at most."""
WINDOW_MB = (0.9, 3.2)
CHECKED_RUNS, FINALISTS, FINAL_BLOCKS, FINAL_ROUNDS = 5, 6, 4, 12
_BASE: Config = {
    **{"pipeline": "producer", "vector_bytes": 16, "reload": "none", "weight_in": "registers"},
    **{"grid": "full", "order": "turns", "levels": 1, "load_hint": "evict_last"},
    **{"store_hint": "default", "register_cap": 0, "arrival": "late", "row_numbers": "next"},
}
_TAILS: tuple[Config, ...] = (
    {"strategy": "separate", "overlap": "dependent", "sum_threads": 256, "slice_columns": 64},
    {"strategy": "column_slices", "overlap": "none", "sum_threads": 0, "slice_columns": 32},
    {"strategy": "mailbox", "overlap": "none", "sum_threads": 0, "slice_columns": 32},
)


def window_mb(config: Config, problem: Problem, target: Target) -> float:
    """The window of a config in MiB (`window_bytes` of the search space)."""
    names = Names(problem, target, True)
    names.update(config)
    return float(names["window_bytes"] / 2**20)


def candidates(problem: Problem, target: Target) -> Iterator[Config]:
    """All legal configs by the window rule."""
    legal = LegalConfigs(load_space(), problem, target)
    choices = {
        "cluster": (1, 2, 4, 8),
        "threads_per_row": (32, 64, 96, 128, 192, 256, 384, 512),
        "rows_per_cta": (1, 2, 3, 4, 8),
        "ctas_per_sm": (1, 2, 3, 4),
        "stages": (2, 3, 4, 5, 6),
        "rows_in_flight": (1, 2),
        "spare_sms": (0, 12, 20, 28),
        "column_sums": ("late", "early"),
    }
    for values in product(*choices.values()):
        chosen = dict(zip(choices, values, strict=True))
        first, last = WINDOW_MB
        if not first <= window_mb(chosen, problem, target) <= last:
            continue
        for tail in _TAILS:
            config = {**_BASE, **tail, **chosen, "min_blocks": chosen["ctas_per_sm"]}
            if legal.is_legal(config):
                yield config


def drawn(problem: Problem, target: Target, number: int, seed: int) -> list[Config]:
    """Draw so many configs, a few of each family and number of teams."""
    found = list(candidates(problem, target))
    random.Random(seed).shuffle(found)
    count: Counter[tuple[Any, ...]] = Counter()
    chosen = []
    for config in found:
        kind = family_of(config), config["rows_per_cta"]
        count[kind] += 1
        if count[kind] <= OF_FAMILY:
            chosen.append(config)
    return chosen[:number]


def package_of(target: Target, problem: Problem) -> Path:
    """The folder of the package for a problem."""
    return results_of(target.name) / problem.operation


def compiles(config: Config, problem: Problem, arch: str) -> bool:
    """Return True if a config becomes machine code without spills, which is then in the cache."""
    compiled = compile_variant(make_variant(config, problem), arch)
    return not compiled.error and not compiled.spills


def fault_of(bench: Bench, workload: Any) -> str:
    """Return what is wrong with a kernel, "" when nothing is."""
    found = check_accuracy(bench, workload.inputs, workload.expected).fault
    return found or check_repeats(bench, workload.cancelling, CHECKED_RUNS)


def measure(
    session: Session,
    timers: Mapping[str, Timer],
    kernel: Kernel,
    configs: list[Config],
    problem: Problem,
    target: Target,
) -> dict[str, Any]:
    """A row of the document. kernel: the package's. Raises NormforgeError for a kernel that is
    wrong."""
    workload = session.workload(problem)
    tried = []
    for config in configs:
        bench = bench_of(workload, config, target)
        if fault := fault_of(bench, workload):
            raise NormforgeError(f"{problem}: {make_variant(config, problem)} is wrong: {fault}")
        (floor, own) = workload.operations([bench], 1)
        reference, times = timers[FLUSH].block([floor, own], SEARCH_ROUNDS)
        tried.append((paired_ratio(times, reference), config, bench))
    tried.sort(key=lambda one: one[0])
    package = workload.bench(Candidate(kernel.read_cubin(package_of(target, problem)), kernel.spec))
    benches = [package, *(bench for _, _, bench in tried[:FINALISTS])]
    ratios: dict[str, list[float]] = {}
    floors = {}
    for condition, timer in timers.items():
        operations = workload.operations(benches, timer.sets(workload.floor_bytes))
        every: list[list[float]] = [[] for _ in operations]
        for _ in range(FINAL_BLOCKS):
            for kept, times in zip(every, timer.block(operations, FINAL_ROUNDS), strict=True):
                kept += times
        floors[condition] = round(median(every[0]), 3)
        ratios[condition] = [round(paired_ratio(own, every[0]), 4) for own in every[1:]]
    best = {c: min(range(1, len(r)), key=r.__getitem__) for c, r in ratios.items()}
    return {
        "shape": str(problem),
        "package": kernel.file,
        "tried": len(tried),
        "floor_us": floors,
        "package_ratio": {c: r[0] for c, r in ratios.items()},
        "best_ratio": {c: r[best[c]] for c, r in ratios.items()},
        "best": {c: dict(tried[place - 1][1]) for c, place in best.items()},
        "cubins": [cubin_of(problem, config, target) for _, config, _ in tried[:FINALISTS]],
        "ratios": ratios,
        "trials": [[round(ratio, 4), dict(config)] for ratio, config, _ in tried],
    }


def line(row: Mapping[str, Any]) -> str:
    """A row in one line."""
    parts = [f"{row['shape']:17} {row['tried']:3} configs"]
    for condition in CONDITIONS:
        before, now = row["package_ratio"][condition], row["best_ratio"][condition]
        parts.append(f"{condition}: {before:.3f} -> {now:.3f} of the floor")
    return "; ".join(parts)


def run(args: argparse.Namespace) -> int:
    """Raises NormforgeError."""
    until = time.monotonic() + args.seconds
    problems = load_problems(args.shapes)
    session = open_session(args.device)
    target = target_of(session.facts)
    folder = package_of(target, problems[0])
    try:
        table = Table.load(folder)
    except (OSError, ValueError) as error:
        raise NormforgeError(f"there is no package to compare with: {error}") from error
    timers = {name: Timer(session.device, condition=name) for name in CONDITIONS}
    document: dict[str, Any] = {
        "environment": machine(session.facts),
        "conditions": {name: timer.facts() for name, timer in timers.items()},
    }
    with ProcessPoolExecutor(spare_cores(), get_context("spawn")) as pool, torch.no_grad():

        def of(problem: Problem) -> dict[str, Any]:
            shape = (problem.M, problem.N, problem.dtype, problem.weight_dtype)
            choice = table.choose(*shape, offset=problem.offset, residual=problem.residual)
            if choice.kernel is None:
                raise NormforgeError(f"{problem} has no kernel in {folder}")
            configs = drawn(problem, target, args.configs, args.seed)
            made = pool.map(partial(compiles, problem=problem, arch=target.arch), configs)
            sound = [config for config, good in zip(configs, made, strict=True) if good]
            row = measure(session, timers, choice.kernel, sound, problem, target)
            return {**row, "how": choice.how}

        _, left = measure_shapes(args, until, problems, document, of, line)
    return 1 if left else 0


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = command_line(
        __doc__, "out", shapes=SHAPES, seconds=400.0, device=0, seed=7, resume=False
    )
    parser.add_argument("--configs", type=int, default=170, help="of each shape, at most")
    args = parser.parse_args(argv)
    return exit_code(__file__, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
