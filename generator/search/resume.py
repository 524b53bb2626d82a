"""Finds what a stored study still says about the kernels of today."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace

from optuna.trial import FrozenTrial

from generator.errors import NormforgeError
from generator.evaluate.evaluator import Pool
from generator.kernels.geometry import Config
from generator.kernels.knobs import KNOBS, knobs_like
from generator.kernels.variant import AnyVariant, kernel_of
from generator.operations import operation_of
from generator.problem import Problem
from generator.result import FLOOR_BYTES
from generator.search.sampler import distributions
from generator.space.legal_configs import LegalConfigs
from generator.studies.records import (
    UNREADABLE,
    Record,
    Winner,
    plain_floor,
    unknown_bytes,
    unreadable_error,
)
from generator.studies.study_log import StudyLog

Known = tuple[Record, FrozenTrial]


def up_to_date(
    study: str, trials: Sequence[FrozenTrial], legal: LegalConfigs, pool: Pool
) -> dict[int, Known]:
    """Trials of a study by their numbers whose configs still give the machine code that was
    measured, with the knobs of today; the space may allow them no more. Where the code is another
    one, it is compiled to find out.

    Raises NormforgeError where another version of this program wrote them."""
    known: dict[int, Known] = {}
    variants: dict[int, AnyVariant] = {}
    try:
        for trial in trials:
            record = Record.from_trial(trial)
            config = legal.complete(record.config)
            if (variant := _make(config, legal)) is not None:
                variants[trial.number] = variant
                known[trial.number] = replace(record, config=config), trial
    except UNREADABLE as error:
        raise unreadable_error(study, error) from error
    unsure = []
    for number, (record, _) in known.items():
        variant = variants[number]
        if pool.code(variant) != record.code:
            job = pool.submit(variant) if record.cubin else None
            unsure.append((number, variant, job))
    for number, variant, job in unsure:
        if job is None or pool.result(variant, job).digest != known[number][0].cubin:
            del known[number]
    return known


def _make(config: Config, legal: LegalConfigs) -> AnyVariant | None:
    """The variant of a recorded config, None where the templates have no such one any more."""
    knobs = {knob.name for knob in legal.space.knobs}
    of_kernel = knobs_like(config)
    known = all(n in of_kernel and value in of_kernel[n].domain for n, value in config.items())
    if not known or not knobs <= config.keys():
        return None
    with suppress(NormforgeError):
        return kernel_of(config, legal.problem)
    return None


def added_values(legal: LegalConfigs, known: Collection[Known]) -> list[tuple[str, int | str]]:
    """Knobs and values that a search of the known trials could not try, and that none has tried."""
    records, trials = zip(*known, strict=True) if known else ((), ())
    found: list[tuple[str, int | str]] = []
    for knob in legal.space.knobs:
        name, neutral = knob.name, KNOBS[knob.name].neutral
        tried = {record.config[name] for record in records}
        choices = [getattr(t.distributions.get(name), "choices", (neutral,)) for t in trials]
        untried = (value for value in knob.values if value not in tried)
        found += [(name, v) for v in untried if any(v not in had for had in choices)]
    return found


def comparable(known: Mapping[int, Known], problem: Problem, evidence: str) -> dict[int, Known]:
    """Return the trials whose floor moves as many bytes as the problem, or is known to move fewer:
    a search compares ratios."""
    return {
        number: (record, trial)
        for number, (record, trial) in known.items()
        if not (unknown_bytes(record.result) and plain_floor(problem, evidence, record.result))
    }


def candidates_of(known: Mapping[int, Known], legal: LegalConfigs) -> dict[int, Known]:
    """Return the trials that the space allows, as if they had been tried in it, and as if their
    floors had moved as many bytes as the problem does: ratios to shorter ones are too large."""
    found, moved = {}, operation_of(legal.problem).traffic_bytes(legal.problem)
    for number, (record, trial) in known.items():
        if legal.is_legal(record.config):
            same = copy(trial)
            same.params, same.distributions = dict(record.config), distributions(legal.space)
            bytes_of_floor = record.result.extra.get(FLOOR_BYTES, moved)
            if same.value is not None and bytes_of_floor < moved:
                same.value *= bytes_of_floor / moved
            found[number] = record, same
    return found


def answer(
    log: StudyLog, known: Mapping[int, Known], legal: LegalConfigs, pool: Pool, trials: int
) -> Winner | None:
    """The winner of a study, if it stands and was chosen from as many trials as are wanted."""
    winner = log.winner
    if winner is None or winner.trials < trials:
        return None
    candidates = len(known)
    if winner.trials < candidates:  # else it takes long, and says nothing more
        candidates = len(candidates_of(known, legal))
    return standing(winner, legal, pool, candidates)


def standing(winner: Winner, legal: LegalConfigs, pool: Pool, candidates: int) -> Winner | None:
    """The winner with the knobs of today; None where the space allows its config no more, where
    other machine code comes of it, and where it was chosen in another space, a narrow one, from
    fewer than the candidates that are known."""
    own = winner.space_hash == legal.space.digest(legal.problem)
    config = legal.today(winner.config)
    if config is None or not (own or winner.trials >= candidates):
        return None
    today = replace(winner, config=config)
    return today if still_made(today, pool) else None


def still_made(winner: Winner, pool: Pool) -> bool:
    """Return True if the winner's config still gives the machine code that was in the finals."""
    variant = kernel_of(winner.config, winner.problem)
    return pool.result(variant, pool.submit(variant)).digest == winner.cubin
