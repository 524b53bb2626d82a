"""The measured shapes that predictions are fitted to and scored by."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import log
from pathlib import Path
from statistics import median

from generator.evaluate.predict.evaluator import predict_us
from generator.evaluate.predict.model import floor_us
from generator.kernels.geometry import Config
from generator.kernels.ptxas import Resources
from generator.kernels.variant import Variant, make_variant
from generator.problem import RMSNORM_BACKWARD, Problem
from generator.studies.reader import Study, read_studies
from generator.studies.records import Record
from generator.target import Target, find_target

MEASURED = ("h200", "h100")
"""GPUs with committed studies that were measured."""


@dataclass(frozen=True)
class Trial:
    """A timed trial. log_ratio: the logarithm of its time over the floor, where the floor is the
    median of those that the same GPU measured in the study: a trial's own scatters by several
    percent where kernels are short."""

    variant: Variant
    resources: Resources
    log_ratio: float
    feasible: bool

    @property
    def config(self) -> Config:
        return self.variant.config


@dataclass(frozen=True)
class Shape:
    """The measurements of one problem. won: the config of its winner; floor_us: the median of the
    GPUs' floors."""

    problem: Problem
    target: Target
    trials: tuple[Trial, ...]
    won: Config
    floor_us: float

    @cached_property
    def feasible(self) -> list[int]:
        """Places of the trials that may win."""
        return [place for place, trial in enumerate(self.trials) if trial.feasible]


def read_shapes(folders: Sequence[Path], operation: str = RMSNORM_BACKWARD) -> list[Shape]:
    """The measured studies of `operation` with a winner in some folders."""
    studies = [
        study
        for folder in folders
        for study in read_studies(folder)
        if study.problem.operation == operation and study.evidence == "measured"
    ]
    return [_shape(study) for study in studies if study.winner is not None]


def _shape(study: Study) -> Shape:
    timed = [r for r in study.records if r.result.us and r.registers is not None]
    floors: dict[str, list[float]] = defaultdict(list)
    for record in timed:
        floors[record.result.gpu].append(record.result.floor_us or 0.0)
    target = find_target(study.gpu)
    # A floor that leaves out the residual is made as much longer as it is expected to be.
    plain = replace(study.problem, residual="")
    longer = floor_us(study.problem, target) / floor_us(plain, target) if study.plain_floor else 1.0
    by_gpu = {gpu: median(times) * longer for gpu, times in floors.items()}
    trials = [_trial(study.problem, record, by_gpu[record.result.gpu]) for record in timed]
    assert study.winner is not None
    return Shape(study.problem, target, tuple(trials), study.winner.config, median(by_gpu.values()))


def _trial(problem: Problem, record: Record, floor: float) -> Trial:
    variant = make_variant(record.config, problem)
    assert record.registers is not None
    assert record.smem is not None
    assert record.result.us is not None
    static = record.smem - variant.smem_bytes
    resources = Resources(record.registers, 0, 0, static)
    return Trial(variant, resources, log(record.result.us / floor), record.feasible)


def physical(shape: Shape) -> list[float]:
    """Predicted µs of every trial by the physical terms alone."""
    return [
        predict_us(t.variant, t.resources, shape.problem, shape.target).us for t in shape.trials
    ]
