"""What a stored study still says about the kernels of today."""

from __future__ import annotations

from collections.abc import Sequence

from optuna.trial import FrozenTrial

from generator.evaluate.evaluator import Pool
from generator.kernels.variant import make_variant
from generator.problem import Problem
from generator.studies.records import UNREADABLE, Record, Winner, unreadable_error

Known = tuple[Record, FrozenTrial]


def up_to_date(
    study: str, trials: Sequence[FrozenTrial], problem: Problem, pool: Pool
) -> dict[int, Known]:
    """Trials of a study by their numbers whose configs still give the machine code that was
    measured. Where the code is another one, it is compiled to find out.

    Raises NormforgeError where another version of this program wrote them."""
    try:
        known = {trial.number: (Record.from_trial(trial), trial) for trial in trials}
        variants = {trial.number: make_variant(trial.params, problem) for trial in trials}
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


def still_made(winner: Winner, pool: Pool) -> bool:
    """Whether the winner's config still gives the machine code that was in the finals."""
    variant = make_variant(winner.config, winner.problem)
    return pool.result(variant, pool.submit(variant)).digest == winner.cubin
