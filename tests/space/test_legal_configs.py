"""What may be asked of the legal configs of a problem, beside what the sampler's tests ask."""

from __future__ import annotations

import random
from itertools import islice

from generator.kernels.strategies import determinism_class
from generator.space.expressions import Names
from tests.support.synthetic import LEGAL, PROBLEM, SPACE, TARGET


def test_a_config_with_a_knob_that_means_nothing_is_not_allowed() -> None:
    """Two configs that differ in it would be one kernel under two names."""
    one = SPACE.sample(PROBLEM, TARGET, random.Random(1), {"pipeline": "direct"})
    assert LEGAL.allows(one)
    for knob in SPACE.knobs:
        for value in knob.choices:
            other = {**one, knob.name: value}
            normal = SPACE.normalize(other, PROBLEM, TARGET)
            if normal != other:
                assert not LEGAL.allows(other), (knob.name, value)
    stages = next(knob for knob in SPACE.knobs if knob.name == "stages")
    meaningless = next(value for value in stages.choices if value != one["stages"])
    assert not LEGAL.allows({**one, "stages": meaningless})


def test_neighbours_may_all_win() -> None:
    rng = random.Random(5)
    for _ in range(3):
        config = LEGAL.draw(rng, (), deterministic=True)
        assert config is not None
        found = list(islice(LEGAL.around(config, rng), 60))
        assert found
        assert all(determinism_class(near) != "none" for near in found)
        changed = {name for near in found for name in near if near[name] != config[name]}
        assert "strategy" in changed or "order" in changed


def test_registers_that_a_config_may_use_are_those_of_its_share_of_an_sm() -> None:
    names = Names(PROBLEM, TARGET, True)
    config = LEGAL.first(1)[0]
    names.update({**config, "threads_per_row": 128, "rows_per_cta": 2, "register_cap": 0})
    budgets = []
    for ctas in (1, 2, 4):
        names["ctas_per_sm"] = ctas
        budgets.append(names["register_budget"])
    assert budgets == [255, 65536 // 512 // 8 * 8, 65536 // 1024 // 8 * 8]
    names["register_cap"] = 40
    assert names["register_budget"] == 40
