"""benchmarks.pipelines: which configs it tries, and what it says of the times."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks import pipelines
from generator.problem import Problem
from generator.space.family import family_of
from generator.space.legal_configs import LegalConfigs
from generator.space.load import load_space
from tests.support.forward import H200

PROBLEM = Problem.parse("4096x4096:bf16")


def test_window_is_the_rows_under_way() -> None:
    config = {
        "spare_sms": 0,
        "ctas_per_sm": 1,
        "cluster": 2,
        "rows_per_cta": 3,
        "rows_in_flight": 1,
        "threads_per_row": 128,
    }
    assert pipelines.window_mb(config, PROBLEM, H200) == pytest.approx(66 * 3 * 8192 / 2**20)
    more = {**config, "spare_sms": 32, "ctas_per_sm": 2, "rows_in_flight": 2}
    assert pipelines.window_mb(more, PROBLEM, H200) == pytest.approx(100 * 6 * 8192 / 2**20)


def test_configs_are_legal_have_a_producer_and_are_spread_over_families() -> None:
    space = load_space()
    legal = LegalConfigs(space, PROBLEM, H200)
    found = pipelines.drawn(PROBLEM, H200, 170, seed=7)
    assert len(found) == 170
    assert found == pipelines.drawn(PROBLEM, H200, 170, seed=7)
    assert found != pipelines.drawn(PROBLEM, H200, 170, seed=8)
    first, last = pipelines.WINDOW_MB
    for config in found:
        assert legal.is_legal(config)
        assert config["pipeline"] == "producer"
        assert first <= pipelines.window_mb(config, PROBLEM, H200) <= last
    kinds = Counter((family_of(config), config["rows_per_cta"]) for config in found)
    assert len(kinds) > 20
    assert max(kinds.values()) <= pipelines.OF_FAMILY
    assert {config["column_sums"] for config in found} == {"early", "late"}


def test_line_says_both_conditions() -> None:
    row = {
        **{"shape": "8x8:bf16", "tried": 3, "package_ratio": {"flush": 1.05, "rotation": 1.1}},
        "best_ratio": {"flush": 1.01, "rotation": 1.02},
    }
    said = pipelines.line(row)
    assert said.index("flush: 1.050 -> 1.010") < said.index("rotation: 1.100 -> 1.020")


def test_without_a_gpu_it_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert pipelines.main(["--out", "none.json"]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err
