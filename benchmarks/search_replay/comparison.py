"""Many searches of each kind in a swept space, and what they found by when."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from statistics import mean, stdev

import optuna
import torch
from optuna.exceptions import ExperimentalWarning

from benchmarks.search_replay.recording import Recording
from benchmarks.search_replay.replay import CLOSE, SEARCHES, SEEDS_FOR_ONE, Replayed

CHECKPOINTS = (30, 60, 100)
"""Evaluations after which searches are compared."""


@dataclass(frozen=True)
class Comparison:
    """The success of one kind of search. reached: the mean of optimum / best found after each of
    CHECKPOINTS, 0 while nothing is found; errors: the standard errors of these means; close: the
    share of seeds within CLOSE of the optimum by then."""

    name: str
    seeds: int
    reached: tuple[float, ...]
    errors: tuple[float, ...]
    close: tuple[float, ...]


def compare(
    recording: Recording,
    seeds: int,
    names: Sequence[str] | None = None,
    checkpoints: Sequence[int] = CHECKPOINTS,
    processes: int | None = None,
    close: float = CLOSE,
) -> list[Comparison]:
    """Search the recording with `seeds` seeds in each way, on all cores unless told otherwise.
    names: default all. A search is given the last checkpoint as its budget and is
    looked at on the way."""
    names = list(SEARCHES) if names is None else names
    jobs = {
        name: [
            (name, max(checkpoints), seed)
            for seed in range(max(1, seeds // SEEDS_FOR_ONE.get(name, 1)))
        ]
        for name in names
    }
    every = [job for own in jobs.values() for job in own]
    workers = processes or len(os.sched_getaffinity(0))
    if workers == 1:
        _start(recording)
        best = [_search(*job) for job in every]
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, context, _start_process, (recording,)) as pool:
            best = list(pool.map(_search, *zip(*every, strict=True)))
    found = dict(zip(every, best, strict=True))
    compared = []
    for name, own in jobs.items():
        paths = [found[job] for job in own]
        reached = [
            [recording.optimum / path[min(count, len(path)) - 1] for path in paths]
            for count in checkpoints
        ]
        means, errors = tuple(map(mean, reached)), tuple(map(_standard_error, reached))
        shares = tuple(mean(share >= 1 / (1 + close) for share in at) for at in reached)
        compared.append(Comparison(name, len(own), means, errors, shares))
    return compared


def _standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean; 0 where one value says nothing about it."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


_replayed: list[Replayed] = []


def _start_process(recording: Recording) -> None:
    torch.set_num_threads(1)  # for the Gaussian process: every core has its own search
    warnings.simplefilter("ignore", ExperimentalWarning)
    _start(recording)


def _start(recording: Recording) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    _replayed[:] = [Replayed(recording)]


def _search(name: str, trials: int, seed: int) -> list[float]:
    """The best ratio after each evaluation."""
    return list(accumulate(SEARCHES[name](_replayed[0], trials, seed), min))


def table(
    recording: Recording, compared: Sequence[Comparison], checkpoints: Sequence[int] = CHECKPOINTS
) -> str:
    """The comparison as text."""
    counts = Replayed(recording).counts()
    lines = [
        f"{recording.problem} on {recording.facts.get('gpu', recording.gpu)}: {counts['legal']} "
        f"legal configs of {counts['recorded']} recorded, {counts['close']} of them within "
        f"{CLOSE:.0%} of the best, which is at {recording.optimum:.4f} x floor.",
        "Mean share of the optimum's speed and its standard error, and share of seeds within "
        f"{CLOSE:.0%} of it, after so many evaluations:",
        "",
        f"{'search':18}{'seeds':>6}" + "".join(f"{count:>22}" for count in checkpoints),
    ]
    for row in compared:
        triples = zip(row.reached, row.errors, row.close, strict=True)
        cells = [f"{reached:.3f} ±{error:.3f}  {close:.0%}" for reached, error, close in triples]
        lines.append(f"{row.name:18}{row.seeds:>6}" + "".join(f"{cell:>22}" for cell in cells))
    return "\n".join(lines)
