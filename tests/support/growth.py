"""A search space of before, and studies of the versions that had one for each space."""

from __future__ import annotations

from dataclasses import replace

import optuna
from optuna.storages import BaseStorage, InMemoryStorage

from generator.space.space import Space
from generator.studies.records import Record
from tests.support.searches import NAME, records, search
from tests.support.synthetic import SPACE

ADDED = {("strategy", "separate"), ("arrival", "early"), ("stages", 4)}
"""Values that the space of today has and that of before has not, which has no knob `arrival` at
all."""


def space_of_before() -> Space:
    """The space of today without ADDED."""
    kept = [knob for knob in SPACE.knobs if knob.name != "arrival"]
    for place, knob in enumerate(kept):
        values = tuple(value for value in knob.values if (knob.name, value) not in ADDED)
        kept[place] = replace(knob, values=values)
    return replace(SPACE, knobs=tuple(kept))


def old_study(to: BaseStorage, name: str, space: Space, trials: int, seed: int) -> list[Record]:
    """A study with a digest in its name, and its records."""
    alone = InMemoryStorage()
    search(alone, trials=trials, space=space, seed=seed)
    optuna.copy_study(
        from_study_name=NAME, from_storage=alone, to_storage=to, to_study_name=f"{NAME}:{name}"
    )
    return records(alone)
