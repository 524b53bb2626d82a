"""The measured shapes that predictions are fitted to and scored by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import log
from operator import itemgetter
from pathlib import Path
from statistics import median

from generator.evaluate.predict.evaluator import predict_us
from generator.evaluate.predict.model import floor_us
from generator.kernels.geometry import Config
from generator.kernels.ptxas import Resources
from generator.kernels.variant import Variant, make_variant
from generator.operations import operation_of
from generator.problem import RMSNORM_BACKWARD, Problem
from generator.space.load import UNPREDICTED
from generator.studies.excerpt import digest_of
from generator.studies.reader import Study, describe_location, read_studies
from generator.studies.records import Record, may_win, median_floors
from generator.studies.storage import JOURNAL_NAME
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


def journal_of(folder: Path) -> str:
    """Return what the fit calls the journal of a folder, whether or not a run has unpacked it."""
    return f"{folder.name}/{JOURNAL_NAME}.xz"


def digests_of(folders: Sequence[Path], known: Mapping[str, str] = {}) -> dict[str, str]:
    """Return, of the journals of some folders, the number of records and a digest of these, by
    which a test knows what was made of others. known: such sayings; of the journals in them only as
    many records count as they say."""
    found = {}
    for folder in folders:
        name = journal_of(folder)
        count, digest = digest_of(Path(describe_location(folder)), first_of(known, name))
        found[name] = f"{count} records, {digest}"
    return found


def first_of(known: Mapping[str, str], name: str) -> int | None:
    """Return how many records `digests_of` says that a journal has, None where it says nothing."""
    return int(known[name].split()[0]) if name in known else None


def read_shapes(
    folders: Sequence[Path],
    operation: str = RMSNORM_BACKWARD,
    known: Mapping[str, str] = {},
) -> list[Shape]:
    """The measured studies of `operation` with a winner in some folders, without kernels that are
    never predicted. known: as in `digests_of`; what was appended since is left out."""
    studies = [
        study
        for folder in folders
        for study in read_studies(folder, first=first_of(known, journal_of(folder)))
        if study.problem.operation == operation and study.evidence == "measured"
    ]
    return [shape for shape in map(_shape, studies) if shape is not None]


def _predictable(config: Config) -> bool:
    knob, value = UNPREDICTED
    return config[knob] != value


def _won(study: Study) -> Config | None:
    """The winner's config, or where no predicted kernel can have it, that of the fastest finalist
    that one can; None where there is none."""
    if study.winner is None:
        return None
    if _predictable(study.winner.config):
        return study.winner.config
    others = [(r.ratio, c) for c, r in study.finals if may_win(c, r) and _predictable(c)]
    return min(others, key=itemgetter(0))[1] if others else None


def _shape(study: Study) -> Shape | None:
    won = _won(study)
    if won is None:
        return None
    accepted = [record for record in study.records if _predictable(record.config)]
    timed = [r for r in accepted if r.result.us and r.registers is not None]
    moved = operation_of(study.problem).traffic_bytes(study.problem)
    floors = median_floors((record.result for record in timed), moved)
    target = find_target(study.gpu)
    # A floor that leaves out the residual is made as much longer as it is expected to be.
    plain = replace(study.problem, residual="")
    without = study.plain_floor and study.problem.residual
    longer = floor_us(study.problem, target) / floor_us(plain, target) if without else 1.0
    by_gpu = {gpu: floor * longer for gpu, floor in floors.items()}
    trials = [_trial(study.problem, record, by_gpu[record.result.gpu]) for record in timed]
    return Shape(study.problem, target, tuple(trials), won, median(by_gpu.values()))


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
