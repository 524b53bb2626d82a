"""Ratios to floors of different bytes do not mix: in a search, in a table, in a report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from generator.evaluate.predict.evaluator import Predictor
from generator.kernels.nvrtc import Compiled
from generator.kernels.ptxas import Resources
from generator.kernels.variant import Variant
from generator.operations import RMSNORM_BACKWARD
from generator.problem import Problem
from generator.report.collect import summaries
from generator.report.text import render_text
from generator.result import Result
from generator.search.budget import Budget
from generator.search.search import search_problem
from generator.space.legal_configs import LegalConfigs
from generator.studies.reader import read_studies
from generator.studies.records import FLOOR, PLAIN_FLOOR, Winner, plain_floor
from generator.studies.storage import JOURNAL_NAME, open_storage
from generator.tuner.display import describe, table
from normforge.spec import MAIN_KERNEL
from tests.support.samples import plain_variant
from tests.support.synthetic import PROBLEM, SPACE, TARGET, FakeEvaluator, FakePool, timed

pytestmark = pytest.mark.usefixtures("quick_proposals")

RESIDUAL = replace(PROBLEM, residual=PROBLEM.dtype)
BYTES = {"floor_bytes": RMSNORM_BACKWARD.traffic_bytes(RESIDUAL)}


class Counting(FakeEvaluator):
    """Floors that count the residual: its results are of a third less."""

    def _result(self, variant: Variant) -> Result:
        result = super()._result(variant)
        assert result.ratio is not None
        return replace(result, ratio=result.ratio * 0.75, extra=BYTES)


def search(folder: Path, evaluator: FakeEvaluator, trials: int, problem: Problem) -> Winner:
    storage, budget = open_storage(folder / JOURNAL_NAME), Budget(trials=trials)
    pool = FakePool()
    winner = search_problem(LegalConfigs(SPACE, problem, TARGET), pool, evaluator, storage, budget)
    assert winner is not None
    return winner


@pytest.mark.parametrize(
    ("shape", "evidence", "extra", "plain"),
    [
        ("64x1024:bf16+residual", "measured", {}, True),
        ("64x1024:bf16+offset+residual_fp32", "measured", {"gpu": "1"}, True),
        ("64x1024:bf16+residual", "measured", {"floor_bytes": 1}, False),
        ("64x1024:bf16+residual", "predicted", {}, False),
        ("64x1024:bf16+offset", "measured", {}, False),
    ],
)
def test_what_was_measured_without_its_residuals_bytes_is_known(
    shape: str, evidence: str, extra: dict[str, Any], plain: bool
) -> None:
    result = replace(timed(1.3), extra=extra)
    assert plain_floor(Problem.parse(shape), evidence, result) is plain
    assert not plain_floor(Problem.parse(shape), evidence, Result("compile_error"))


def test_a_finished_study_answers_as_before_and_a_search_that_goes_on_starts_anew(
    tmp_path: Path,
) -> None:
    old = search(tmp_path, FakeEvaluator(), 30, RESIDUAL)
    idle = Counting()
    assert search(tmp_path, idle, 30, RESIDUAL) == old
    assert idle.evaluated == []
    assert old.floor == PLAIN_FLOOR
    new = search(tmp_path, Counting(), 40, RESIDUAL)
    assert (new.floor, new.trials) == (FLOOR, 40)
    (study,) = read_studies(tmp_path)
    assert len(study.records) == 40
    assert all("floor_bytes" in record.result.extra for record in study.records)
    assert not study.plain_floor


def test_without_a_residual_a_search_goes_on_with_what_it_has(tmp_path: Path) -> None:
    search(tmp_path, FakeEvaluator(), 30, PROBLEM)
    more = FakeEvaluator()
    assert search(tmp_path, more, 40, PROBLEM).floor == FLOOR
    assert len(more.evaluated) <= 10


def test_lines_and_tables_say_what_a_ratio_is_to(tmp_path: Path) -> None:
    old = search(tmp_path, FakeEvaluator(), 30, RESIDUAL)
    plain = search(tmp_path, FakeEvaluator(), 30, PROBLEM)
    assert f"x {PLAIN_FLOOR}" in describe(RESIDUAL, old)
    assert "x floor, measured" in describe(PROBLEM, plain)
    shown = table([(RESIDUAL, old), (PROBLEM, plain)])
    assert f"{old.result.ratio:.3f}* " in shown
    assert f"{plain.result.ratio:.3f}  " in shown
    assert f"* to {PLAIN_FLOOR}" in shown
    assert "*" not in table([(PROBLEM, plain)])


@pytest.mark.slow
def test_a_report_marks_ratios_to_a_plain_floor_and_leaves_them_out_of_the_mean(
    tmp_path: Path,
) -> None:
    search(tmp_path, FakeEvaluator(), 30, RESIDUAL)
    plain = search(tmp_path, FakeEvaluator(), 30, PROBLEM)
    (summary,) = summaries(read_studies(tmp_path), "here")
    assert summary.plain_floors == 1
    assert summary.ratio == pytest.approx(plain.result.ratio)
    text = render_text(summary)
    assert f"* 1 shapes, not in the mean: over {PLAIN_FLOOR}" in text
    search(tmp_path, Counting(), 40, RESIDUAL)
    (summary,) = summaries(read_studies(tmp_path), "here")
    assert summary.plain_floors == 0
    assert "*" not in render_text(summary).split("Strategies")[0]


def test_a_prediction_says_the_bytes_of_its_floor() -> None:
    variant = plain_variant(RESIDUAL, TARGET)
    resources = {MAIN_KERNEL: Resources(32, 0, 0, 0)}
    compiled = Compiled(TARGET.arch, "", b"", resources, "0", False, "")
    result = Predictor(TARGET).evaluate(RESIDUAL, variant, compiled, None)
    assert result.extra["floor_bytes"] == BYTES["floor_bytes"]
