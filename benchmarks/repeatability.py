"""Repeat finals and searches, to see if they choose and find the same kernel again.

    python -m benchmarks.repeatability --out repeatability.json

For every shape, without an incumbent: the finals of the trials in the committed study, several
times; and whole searches with other seeds, which know the winners of the other shapes and nothing
of this one. Finals replace the GPU process, so that no two of them share one. All kernels that won,
the committed one too, are then timed in turns, in blocks of PROCESSES more processes. Two that are
the same machine code and launch are one kernel. Two kernels tie when they differ by no more than
1 %, or than two standard errors of their difference. The file is written after each shape; --resume
keeps the shapes that it has. Exit code: 1 where shapes are left, 2 for bad input or without the GPU
of the studies.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from itertools import combinations
from math import sqrt
from operator import truediv
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from optuna.storages import InMemoryStorage

from benchmarks.command import command_line, exit_code, say, spare_cores
from benchmarks.gpu import target_of
from benchmarks.results import machine
from benchmarks.shape_by_shape import measure_shapes
from generator.errors import NormforgeError, ProblemError
from generator.evaluate.evaluator import Pool, Shortlisting
from generator.evaluate.gpu.evaluator import MeasuredEvaluator
from generator.evaluate.gpu.supervisor import Supervisor
from generator.kernels.compile_pool import CompilePool
from generator.kernels.geometry import Config
from generator.kernels.resource_gate import identity
from generator.kernels.strategies import launches
from generator.paths import GENERATED
from generator.problem import Problem
from generator.search.budget import Budget
from generator.search.choose_winner import choose
from generator.search.finals import Final, compile_configs, hold_finals
from generator.search.search import search_problem
from generator.shape_lists import load_problems
from generator.space.legal_configs import LegalConfigs
from generator.space.load import load_space
from generator.studies.reader import Study, read_studies

SHAPES = ",".join(
    f"{small},{middle},{large}"
    for small, middle, large in (
        ("4096x256:bf16", "4096x1024:fp32", "4096x4096:fp32"),
        ("8192x256:bf16", "4096x2048:fp16", "4096x8192:bf16"),
        ("4096x512:bf16", "16384x1024:bf16", "65536x1024:bf16"),
        ("16384x256:bf16", "4096x4096:bf16", "16384x4096:bf16"),
    )
)
"""Floors of 7 to 12 us, of 17 to 31 and of 53 to 100, by turns."""
TIE = 0.01
"""Kernels whose times differ by less are as good."""
PROCESSES, BLOCKS = 2, 5
"""The GPU processes in which all winners are timed side by side, and the blocks in each."""

Won = list[tuple[str, Config]]
"""Winners, and by which of GROUPS."""
GROUPS = ("finals", "search", "committed")


def finals_again(
    legal: LegalConfigs, pool: Pool, evaluator: MeasuredEvaluator, study: Study
) -> tuple[Config | None, list[Final]]:
    """The winner of new finals of a study's trials, without an incumbent, and the finals."""
    finals = hold_finals(legal, pool, evaluator, study.records, None)
    results = [(final.variant.config, final.result) for final in finals]
    choice = choose(results, legal.rank, None)
    return (results[choice.winner][0] if choice else None), finals


def side_by_side(
    legal: LegalConfigs, pool: Pool, evaluator: Shortlisting, gpu: Supervisor, won: Won
) -> tuple[list[dict[str, Any]], list[str]]:
    """The kernels that won, each once, with its ratio to the floor in every block; and of each of
    `won` the identity of its kernel."""
    entries = compile_configs(legal, pool, [config for _, config in won])
    if len(entries) < len(won):
        raise ProblemError(f"{legal.problem}: a winner does not compile any more")
    names = [identity(*entry, legal.problem, legal.target) for entry in entries]
    kernels = dict(zip(names, entries, strict=True))
    blocks = []
    for _ in range(PROCESSES):
        gpu.renew(None)
        blocks += [
            evaluator.shortlist(legal.problem, list(kernels.values()), 1) for _ in range(BLOCKS)
        ]
    ratios = zip(*filter(None, blocks), strict=True)  # a block that stays noisy is empty
    found = [
        {
            "kernel": name,
            "variant": variant.id,
            "launches": launches(variant.config),
            "ratio": round(median(own), 4),
            "blocks": [round(ratio, 5) for ratio in own],
        }
        for (name, (variant, _)), own in zip(kernels.items(), ratios, strict=True)
    ]
    return found, names


def gap(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return by how much a kernel is slower than another, relative to it, and the standard error of
    that, from their ratios in the same blocks."""
    each = [ratio - 1 for ratio in map(truediv, first, second)]
    return mean(each), stdev(each) / sqrt(len(each))


def tie(first: Sequence[float], second: Sequence[float]) -> bool:
    """Return True if two kernels count as equal by their ratios in the same blocks."""
    difference, error = gap(first, second)
    return abs(difference) <= max(TIE, 2 * error)


def agreement(row: Mapping[str, Any]) -> dict[str, list[int]]:
    """Count, for the winners of each of GROUPS and for all, the pairs, the pairs of one kernel, and
    the pairs that tie."""
    blocks = {kernel["kernel"]: kernel["blocks"] for kernel in row["kernels"]}
    found = {}
    for group in (*GROUPS[:2], "all"):
        names = [w["kernel"] for w in row["winners"] if group in (w["by"], "all")]
        pairs = list(combinations(names, 2))
        same = sum(a == b for a, b in pairs)
        tied = sum(a != b and tie(blocks[a], blocks[b]) for a, b in pairs)
        found[group] = [len(pairs), same, tied]
    return found


def repeat(
    legal: LegalConfigs,
    pool: Pool,
    evaluator: MeasuredEvaluator,
    gpu: Supervisor,
    studies: Mapping[Problem, Study],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Repeat the finals and searches of one shape. Raises ProblemError where it cannot be timed."""
    study, began = studies[legal.problem], time.monotonic()
    assert study.winner is not None
    gpu.spare(args.searches + args.repeats + PROCESSES)
    size = (legal.problem.M, legal.problem.N)
    others = [s.winner for p, s in studies.items() if s.winner and size != (p.M, p.N)]
    budget, won = Budget(args.trials), Won()
    for seed in range(args.searches):
        winner = search_problem(
            legal,
            pool,
            evaluator,
            InMemoryStorage(),
            budget,
            known_winners=others,
            seed=seed,
        )
        won += [("search", winner.config)] if winner else []
    searched = time.monotonic()
    finals = []
    for _ in range(args.repeats):
        config, held = finals_again(legal, pool, evaluator, study)
        won += [("finals", config)] if config else []
        with_times = [final for final in held if final.result.timed]
        finals.append(
            {
                "floor_us": max((f.result.floor_us or 0.0 for f in with_times), default=None),
                "block_ratios": {
                    f.variant.id: f.result.extra.get("block_ratios") for f in with_times
                },
            }
        )
    repeated = time.monotonic()
    won.append(("committed", study.winner.config))
    kernels, names = side_by_side(legal, pool, evaluator, gpu, won)
    seconds = (searched - began, repeated - searched, time.monotonic() - repeated)
    row: dict[str, Any] = {
        "shape": str(legal.problem),
        "winners": [{"by": by, "kernel": name} for (by, _), name in zip(won, names, strict=True)],
        "kernels": kernels,
        "finals": finals,
        "seconds": [round(part, 1) for part in seconds],
    }
    return row | {"agreement": agreement(row)}


def summary(rows: Collection[Mapping[str, Any]]) -> str:
    """The probability, over all pairs of winners of one shape, that they are one kernel or tie."""
    lines = []
    for group in (*GROUPS[:2], "all"):
        counts = [row["agreement"][group] for row in rows]
        pairs, same, tied = (sum(count[i] for count in counts) for i in range(3))
        if pairs:
            lines.append(
                f"{group}: {same} of {pairs} pairs are one kernel and {tied} tie, "
                f"P(same winner or tie) = {(same + tied) / pairs:.2f}"
            )
    return "\n".join(lines)


def measured_studies(folder: Path, problems: Sequence[Problem]) -> dict[Problem, Study]:
    """The measured studies with a winner, of one GPU. Raises NormforgeError where one lacks."""
    studies = {
        study.problem: study
        for study in read_studies(folder)
        if study.evidence == "measured" and study.winner is not None
    }
    if lacking := [str(problem) for problem in problems if problem not in studies]:
        raise NormforgeError(f"{folder} has no measured winner of {', '.join(lacking)}")
    return studies


def run(args: argparse.Namespace) -> int:
    """Raises NormforgeError."""
    until = time.monotonic() + args.seconds
    problems = load_problems(args.shapes)
    studies = measured_studies(args.studies, problems)
    gpu = Supervisor(args.device)
    target = target_of(gpu.facts, studies[problems[0]].gpu)
    plan = {name: getattr(args, name) for name in ("repeats", "searches", "trials")}
    environment = {**machine(gpu.facts, timed=True), **plan}
    with (
        closing(MeasuredEvaluator(target, gpu)) as evaluator,
        CompilePool(target.arch, spare_cores()) as pool,
    ):

        def measure(problem: Problem) -> dict[str, Any] | None:
            legal = LegalConfigs(load_space(), problem, target)
            try:
                return repeat(legal, pool, evaluator, gpu, studies, args)
            except ProblemError as error:
                say(str(error))
                return None

        def tell(row: dict[str, Any]) -> str:
            return f"{row['shape']} {row['agreement']}, {sum(row['seconds']):.0f} s"

        rows, left = measure_shapes(
            args, until, problems, {"environment": environment}, measure, tell
        )
        say(evaluator.disturbances())
    say(summary(rows))
    return 1 if left else 0


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = command_line(__doc__, "out", shapes=SHAPES, seconds=330.0, device=0, resume=False)
    parser.add_argument("--studies", type=Path, default=GENERATED / "h200")
    parser.add_argument("--repeats", type=int, default=3, help="finals of each shape")
    parser.add_argument("--searches", type=int, default=2, help="of each shape")
    parser.add_argument("--trials", type=int, default=60, help="of each search")
    args = parser.parse_args(argv)
    return exit_code(__file__, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
