"""Families of configs: variations of one kernel."""

from __future__ import annotations

import random

import pytest

from generator.space.family import family_of
from tests.support.synthetic import LEGAL

CONFIG = {**LEGAL.first(1)[0], "strategy": "column_slices"}


@pytest.mark.parametrize(
    "other",
    [
        {"pipeline": "direct"},
        {"cluster": 2},
        {"threads_per_row": 256},
        {"rows_in_flight": 2},
        {"ctas_per_sm": 4},
        {"strategy": "semaphore"},  # adds in turns
        {"strategy": "atomic"},  # adds on arrival
    ],
    ids=str,
)
def test_what_moves_rows_otherwise_is_another_family(other: dict[str, int | str]) -> None:
    assert CONFIG.items() & other.items() == set()
    assert family_of({**CONFIG, **other}) != family_of(CONFIG)


def test_hints_slices_and_who_sums_stored_rows_are_variations() -> None:
    variations = {"load_hint": "evict_last", "stages": 6, "slice_columns": 256, "rows_per_cta": 8}
    variations |= {"strategy": "separate", "spare_sms": 28, "register_cap": 64, "grid": "even"}
    assert family_of({**CONFIG, **variations}) == family_of(CONFIG)
    assert family_of({**CONFIG, "strategy": "bulk_reduce"}) == family_of(
        {**CONFIG, "strategy": "semaphore"}
    ), "both add in turns"


def test_there_are_many_families() -> None:
    rng = random.Random(0)
    drawn = [config for _ in range(100) if (config := LEGAL.draw(rng, ()))]
    assert len({family_of(config) for config in drawn}) > 40
