"""Compare the flush with rotation: whether configs rank alike, how noisily, and at what price.

    python -m benchmarks.conditions --out conditions.json

For every shape the winner of its study and the best trials of other families, each with the load
hint evict_last and without, are timed under both conditions of generator/evaluate/gpu/rotation.py:
alone beside the floor, as the trials of a search, and all in the same blocks, as its finals; both
several times, and the conditions take turns. Kendall's tau says how well two rankings agree, from
-1 to 1: of the conditions with each other; of the two halves of one condition's repeats, which is
the most that can be expected; and of trials with finals, which is what trials are for. The file has
the median of every block and is written after each shape. Exit code: 1 where --seconds left shapes,
2 for bad input or without the GPU of the studies.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import geometric_mean, mean, median, stdev
from typing import Any

import torch

from benchmarks.command import command_line, exit_code
from benchmarks.gpu import bench_of, cubin_of, open_session, paired_ratio, target_of
from benchmarks.repeatability import measured_studies
from benchmarks.results import machine
from benchmarks.shape_by_shape import measure_shapes
from generator.evaluate.gpu.rotation import CONDITIONS, FLUSH, ROTATION
from generator.evaluate.gpu.session import FINAL_ROUNDS, SEARCH_ROUNDS, Session
from generator.evaluate.gpu.timer import Timer
from generator.kernels.geometry import Config
from generator.paths import results_of
from generator.shape_lists import load_problems
from generator.studies.reader import Study
from generator.target import Target

SHAPES = (
    "4096x256:bf16,4096x1024:bf16,16384x1024:bf16,4096x4096:bf16,16384x3072:bf16,"
    "16384x4096:bf16,65536x4096:bf16,4096x8192:bf16,16384x8192:bf16,4096x16384:bf16"
)
FAMILY = ("strategy", "order", "pipeline", "cluster", "threads_per_row", "rows_per_cta")
"""Knobs by which two configs are of different families here. Unlike the families of the search
(generator/space/family.py), they tell all strategies apart; the committed results have them."""
FAMILIES = 7
"""Families of each shape, that of the winner among them."""
HINTS = ("evict_last", "default")
TRIALS, FINALS = 6, 5
"""Blocks of each config alone, and of all together."""

Blocks = list[list[float]]
"""The median ratio to the floor in every block, for each entry."""


def families(study: Study, number: int = FAMILIES) -> list[Config]:
    """The winner's config, then the fastest trial of each other family."""
    assert study.winner is not None
    found: dict[tuple[Any, ...], Config] = {}
    for config in (study.winner.config, *(record.config for record in study.ranked)):
        found.setdefault(tuple(config.get(knob) for knob in FAMILY), config)
    return list(found.values())[:number]


def tau(one: Sequence[float], other: Sequence[float]) -> float:
    """Kendall's tau of two rankings: pairs in the same order less those in the other one, over all
    pairs."""
    pairs = list(combinations(zip(one, other, strict=True), 2))
    signs = [_sign(b[0] - a[0]) * _sign(b[1] - a[1]) for a, b in pairs]
    return sum(signs) / len(signs)


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)


def halves(blocks: Blocks) -> float:
    """Tau of the medians of every other block and of the rest."""
    return tau([median(own[0::2]) for own in blocks], [median(own[1::2]) for own in blocks])


def spread(blocks: Blocks) -> float:
    """Return how far the medians of one entry's blocks scatter, as their standard deviation over
    their mean; the median over the entries."""
    return median(stdev(own) / mean(own) for own in blocks)


def summary(hints: Sequence[str], found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Summarise the blocks of a shape. hints: of each entry, each config's HINTS in their order;
    found: `trials` and `finals` of each condition. loss: by how much what a condition's trials rank
    first is slower, in the finals of the other or the same one, than what these rank first. hint:
    time with the hint over that without, in finals."""
    middle = {
        (condition, kind): [median(own) for own in found[condition][kind]]
        for condition in found
        for kind in ("trials", "finals")
    }
    said: dict[str, Any] = {
        "tau": {
            kind: round(tau(middle[FLUSH, kind], middle[ROTATION, kind]), 3)
            for kind in ("trials", "finals")
        }
    }
    for condition in found:
        trials, finals = middle[condition, "trials"], middle[condition, "finals"]
        first = trials.index(min(trials))
        hinted = [us for us, hint in zip(finals, hints, strict=True) if hint == HINTS[0]]
        plain = [us for us, hint in zip(finals, hints, strict=True) if hint != HINTS[0]]
        said[condition] = {
            "tau_halves": {k: round(halves(found[condition][k]), 3) for k in ("trials", "finals")},
            "spread": {k: round(spread(found[condition][k]), 5) for k in ("trials", "finals")},
            "tau_to_finals": {c: round(tau(trials, middle[c, "finals"]), 3) for c in found},
            "loss_in_finals": {
                c: round(middle[c, "finals"][first] / min(middle[c, "finals"]) - 1, 5)
                for c in found
            },
            "hint": round(geometric_mean([a / b for a, b in zip(hinted, plain, strict=True)]), 4),
        }
    return said


def measure(timers: Mapping[str, Timer], session: Session, study: Study, target: Target) -> Any:
    """A row of the document. Raises NormforgeError where a config does not compile."""
    workload = session.workload(study.problem)
    configs = families(study)
    entries = [(config, hint) for config in configs for hint in HINTS]
    benches = [bench_of(workload, {**c, "load_hint": hint}, target) for c, hint in entries]
    found: dict[str, dict[str, Any]] = {}
    operations = {}
    for condition, timer in timers.items():
        began, sets = time.perf_counter(), timer.sets(workload.floor_bytes)
        operations[condition] = workload.operations(benches, sets)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        found[condition] = {"sets": sets, "preparing_seconds": round(seconds, 3)}
        found[condition] |= {"floor_us": [], "trial_seconds": [], "finals_seconds": []}
        found[condition] |= {kind: [[] for _ in entries] for kind in ("trials", "finals")}
    for repeat in range(TRIALS):
        for condition, timer in timers.items():
            floor, *ours = operations[condition]
            for place, own in enumerate(ours):
                began = time.perf_counter()
                reference, times = timer.block([floor, own], SEARCH_ROUNDS)
                found[condition]["trial_seconds"].append(time.perf_counter() - began)
                found[condition]["floor_us"].append(median(reference))
                found[condition]["trials"][place].append(round(paired_ratio(times, reference), 5))
            if repeat < FINALS:
                began = time.perf_counter()
                reference, *rest = timer.block([floor, *ours], FINAL_ROUNDS)
                found[condition]["finals_seconds"].append(time.perf_counter() - began)
                for kept, times in zip(found[condition]["finals"], rest, strict=True):
                    kept.append(round(paired_ratio(times, reference), 5))
    for of in found.values():
        of |= {k: round(median(of[k]), 4) for k in ("floor_us", "trial_seconds", "finals_seconds")}
    hints = [hint for _, hint in entries]
    return {
        "shape": str(study.problem),
        "winner_hint": str(configs[0]["load_hint"]),
        "entries": [
            {
                "config": dict(config),
                "hint": hint,
                "cubin": cubin_of(study.problem, {**config, "load_hint": hint}, target),
            }
            for config, hint in entries
        ],
        **found,
        "summary": summary(hints, found),
    }


def line(row: Mapping[str, Any]) -> str:
    """A row in one line: agreement of the conditions, then of each its own, noise and price."""
    said = row["summary"]
    parts = [f"{row['shape']:18} tau {said['tau']['finals']:.2f}"]
    for condition in CONDITIONS:
        own, seconds = said[condition], row[condition]["trial_seconds"]
        parts.append(
            f"{condition}: halves {own['tau_halves']['finals']:.2f}, trials to finals "
            f"{own['tau_to_finals'][condition]:.2f}, spread {own['spread']['trials']:.2%}, "
            f"hint {own['hint']:.3f}, {seconds * 1e3:.0f} ms a trial"
        )
    return "; ".join(parts)


def run(args: argparse.Namespace) -> int:
    """Raises NormforgeError."""
    until = time.monotonic() + args.seconds
    problems = load_problems(args.shapes)
    session = open_session(args.device)
    target = target_of(session.facts)
    studies = measured_studies(args.studies or results_of(target.name), problems)
    target_of(session.facts, studies[problems[0]].gpu)
    timers = {name: Timer(session.device, condition=name) for name in CONDITIONS}
    document: dict[str, Any] = {
        "environment": machine(session.facts),
        "conditions": {n: {"what": CONDITIONS[n], **timers[n].facts()} for n in CONDITIONS},
        "rounds": {"trials": SEARCH_ROUNDS, "finals": FINAL_ROUNDS},
    }
    with torch.no_grad():
        _, left = measure_shapes(
            args,
            until,
            problems,
            document,
            lambda problem: measure(timers, session, studies[problem], target),
            line,
        )
    return 1 if left else 0


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = command_line(__doc__, "out", shapes=SHAPES, seconds=400.0, device=0, resume=False)
    parser.add_argument("--studies", type=Path, help="default: those of this GPU")
    args = parser.parse_args(argv)
    return exit_code(__file__, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
