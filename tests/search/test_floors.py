"""Ratios to floors of different bytes do not mix: in a search, in a table, in a report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
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
from generator.search.resume import candidates_of, comparable
from generator.search.search import search_problem
from generator.space.legal_configs import LegalConfigs
from generator.studies.reader import read_studies
from generator.studies.records import (
    FLOOR,
    PLAIN_FLOOR,
    Winner,
    median_floors,
    over_median_floor,
    plain_floor,
)
from generator.studies.storage import JOURNAL_NAME, open_storage
from generator.tuner.display import describe, table
from normforge.spec import MAIN_KERNEL
from tests.support.samples import plain_variant, space_of
from tests.support.synthetic import PROBLEM, SPACE, TARGET, FakeEvaluator, FakePool, timed

pytestmark = pytest.mark.usefixtures("quick_proposals")

RESIDUAL = replace(PROBLEM, residual=PROBLEM.dtype)
BYTES = {"floor_bytes": RMSNORM_BACKWARD.traffic_bytes(RESIDUAL)}
ANGLES = 2 * 2 * 64 * 4
"""Bytes of cos and sin of 64 heads, which are two tokens."""


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
        ("rope:64x128:bf16", "measured", {"floor_bytes": 64 * 128 * 4}, True),
        ("rope:64x128:bf16", "measured", {"floor_bytes": 64 * 128 * 4 + ANGLES}, False),
        ("rope:64x128:bf16", "predicted", {"floor_bytes": 64 * 128 * 4}, False),
        ("rope:64x128:bf16", "measured", {}, False),
    ],
)
def test_what_was_measured_without_all_of_its_bytes_is_known(
    shape: str, evidence: str, extra: dict[str, Any], plain: bool
) -> None:
    result = replace(timed(1.3), extra=extra)
    assert plain_floor(Problem.parse(shape), evidence, result) is plain
    assert not plain_floor(Problem.parse(shape), evidence, Result("compile_error"))


def test_floors_of_fewer_bytes_count_as_longer_ones() -> None:
    """Otherwise a study's median would be of the one or the other, whichever it has more of."""
    of_bytes = [replace(timed(1.2), extra={"floor_bytes": size}) for size in (100, 100, 80)]
    usual = of_bytes[0].floor_us
    assert usual is not None
    assert median_floors(of_bytes) == {of_bytes[0].gpu: usual}
    fewer = [replace(one, floor_us=0.8 * usual) for one in of_bytes[2:]] * 5
    assert median_floors([*of_bytes, *fewer]) == {of_bytes[0].gpu: pytest.approx(usual)}
    assert over_median_floor(of_bytes) == pytest.approx([1.2] * 3)
    assert median_floors([replace(one, extra={}) for one in of_bytes]) == {of_bytes[0].gpu: usual}


def test_a_search_goes_on_with_trials_whose_floor_was_of_fewer_bytes() -> None:
    """Their times compare. Those that do not say what their floor moved may be of anything."""
    problem = Problem.parse("rope:64x128:bf16")
    fewer = replace(timed(1.3), extra={"floor_bytes": 64 * 128 * 4})
    known = {3: (SimpleNamespace(result=fewer), None)}
    assert plain_floor(problem, "measured", fewer)
    assert comparable(known, problem, "measured") == known  # type: ignore[arg-type,comparison-overlap]
    legal = LegalConfigs(space_of("rope"), problem, TARGET)
    config = next(legal.space.legal(problem, TARGET, fixed={"threads_per_row": 8}))
    record = SimpleNamespace(result=fewer, config=config)
    trial = optuna.trial.create_trial(value=1.3)
    ((_, (_, moved)),) = candidates_of({3: (record, trial)}, legal).items()  # type: ignore[dict-item]
    assert moved.value == pytest.approx(1.3 * (64 * 128 * 4) / (64 * 128 * 4 + ANGLES))
    assert trial.value == 1.3
    whole = SimpleNamespace(result=replace(fewer, extra={}), config=config)
    ((_, (_, same)),) = candidates_of({3: (whole, trial)}, legal).items()  # type: ignore[dict-item]
    assert same.value == 1.3
    unsaid = {4: (SimpleNamespace(result=timed(1.3)), None)}
    assert comparable(unsaid, RESIDUAL, "measured") == {}  # type: ignore[arg-type]


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
