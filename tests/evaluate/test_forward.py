"""Forwards on a GPU that does not exist: they are searched as backwards are, and what goes wrong
with one costs no other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optuna.storages import InMemoryStorage

from generator.errors import NormforgeError
from generator.evaluate.gpu.evaluator import MeasuredEvaluator
from generator.evaluate.gpu.supervisor import Supervisor
from generator.kernels.variant import kernel_of
from generator.problem import Problem
from generator.search.budget import FINALISTS, FORWARD_TRIALS, Budget
from generator.search.search import search_problem
from generator.space.legal_configs import LegalConfigs
from generator.space.load import load_space, space_file
from generator.studies.records import Record, Winner
from generator.studies.study_log import StudyLog
from tests.support.fake_gpu import FakeGpu, ForwardLandscape, Log, Weather
from tests.support.forward import H200, InstantPool

PROBLEM = Problem.parse("rmsnorm_forward:4096x1024:bf16")
WITH_RESIDUAL = replace(PROBLEM, residual="bf16")
BUDGET = Budget(FORWARD_TRIALS["measured"])
KEPT = {"threads_per_row": (64, 128), "rows_per_cta": (1, 2, 4), "ctas_per_sm": (0,)}
"""Values of some knobs that leave a handful of forwards."""
WHOLE = load_space(space_file(PROBLEM.operation))
SPACE = replace(
    WHOLE, knobs=tuple(replace(k, values=KEPT.get(k.name, k.values)) for k in WHOLE.knobs)
)
LEGAL = LegalConfigs(SPACE, PROBLEM, H200)
CONFIGS = LEGAL.first(100)
VARIANTS = [kernel_of(config, PROBLEM) for config in CONFIGS]
RATIOS = [1.05 + 0.03 * ((7 * place) % len(VARIANTS)) for place in range(len(VARIANTS))]
FASTEST = sorted(range(len(VARIANTS)), key=RATIOS.__getitem__)


def landscape(
    faults: dict[int, str] | None = None, residual: dict[int, str] | None = None
) -> ForwardLandscape:
    """The times above, with faults by place."""

    def by_id(planted: dict[int, str] | None) -> dict[str, str]:
        return {VARIANTS[place].id: fault for place, fault in (planted or {}).items()}

    ratios = {v.id: ratio for v, ratio in zip(VARIANTS, RATIOS, strict=True)}
    return ForwardLandscape(ratios, by_id(faults), by_id(residual))


@contextmanager
def evaluator(gpu: FakeGpu, seconds: float = 20.0) -> Iterator[MeasuredEvaluator]:
    supervisor = Supervisor(
        0, seconds, open_handler=gpu, method="forkserver", sleep=lambda seconds: None
    )
    with MeasuredEvaluator(H200, supervisor) as found:
        yield found


class Searched:
    """A search of the forwards above on the fake GPU."""

    def __init__(self, tmp_path: Path, planted: ForwardLandscape, **options: Any) -> None:
        self.log, self.storage = Log(tmp_path / "log"), InMemoryStorage()
        self.gpu = FakeGpu(self.log, planted, Weather(**{"jitter": 0.0005, **options}))
        self.winner = self.again()

    def again(self) -> Winner | None:
        with evaluator(self.gpu, 2.0) as measuring:
            return search_problem(LEGAL, InstantPool(), measuring, self.storage, BUDGET)

    @property
    def records(self) -> dict[str, Record]:
        (study,) = self.storage.get_all_studies()
        trials = StudyLog(self.storage, study.study_name).trials()
        return {record.variant: record for record in map(Record.from_trial, trials)}

    def jobs(self, problem: Problem) -> list[str]:
        begun = [entry for entry in self.log.read() if entry.get("event") == "begin"]
        return [job["kind"] for job in begun if job["problem"] == str(problem)]


def test_all_are_tried_and_the_fastest_wins_and_its_study_answers_the_next_time(
    tmp_path: Path,
) -> None:
    searched = Searched(tmp_path, landscape())
    assert searched.winner is not None
    assert searched.winner.variant == VARIANTS[FASTEST[0]].id
    assert searched.winner.study == f"{PROBLEM}@h200-132sm:measured"
    assert searched.winner.trials == len(VARIANTS) > FINALISTS
    assert searched.winner.result.ratio == pytest.approx(RATIOS[FASTEST[0]], rel=0.01)
    assert searched.winner.result.extra["condition"] == "rotation"
    assert searched.winner.result.extra["floor_bytes"] == 2 * 4096 * 1024 * 2
    assert searched.winner.result.checks[-1] == "residual"
    assert searched.records.keys() == {variant.id for variant in VARIANTS}
    assert {record.result.outcome for record in searched.records.values()} <= {"ok", "slow"}
    kinds = searched.jobs(PROBLEM)
    assert (kinds.count("evaluate"), kinds.count("determinism")) == (len(VARIANTS), FINALISTS)
    assert searched.jobs(WITH_RESIDUAL).count("determinism") == FINALISTS
    assert "digest" not in kinds, "nothing is summed over rows"
    before = searched.log.read()
    assert searched.again() == searched.winner
    assert [e for e in searched.log.read()[len(before) :] if e.get("event")] == []


@pytest.mark.parametrize(
    ("fault", "outcome", "calls"),
    [
        ("wrong", "wrong", "with a residual"),
        ("wrong", "wrong", "without"),
        ("unsteady", "nondeterministic", "with a residual"),
        ("unsteady", "nondeterministic", "without"),
        ("segfault", "crashed", "all"),
        ("hang", "timeout", "all"),
        ("refused", "launch_error", "all"),
    ],
)
def test_one_that_fails_a_check_does_not_win_and_costs_no_other(
    tmp_path: Path, fault: str, outcome: str, calls: str
) -> None:
    place = FASTEST[0]
    faults = {} if calls == "with a residual" else {place: fault}
    residual = {} if calls == "all" else {place: "" if calls == "without" else fault}
    searched = Searched(tmp_path, landscape(faults, residual))
    assert searched.winner is not None
    assert searched.winner.variant == VARIANTS[FASTEST[1]].id
    found = searched.records.pop(VARIANTS[place].id)
    assert found.result.outcome == ("ok" if calls == "with a residual" else outcome)
    left = {name: record for name, record in searched.records.items() if name != found.variant}
    assert {record.result.outcome for record in left.values()} <= {"ok", "slow"}


def test_one_that_breaks_the_worker_beside_others_drops_out_of_the_finals(tmp_path: Path) -> None:
    searched = Searched(tmp_path, landscape({FASTEST[0]: "late_sticky"}))
    assert searched.winner is not None
    assert searched.winner.variant == VARIANTS[FASTEST[1]].id


def test_a_gpu_that_stays_noisy_gives_no_times(tmp_path: Path) -> None:
    with pytest.raises(NormforgeError, match="no clean numbers"):
        Searched(tmp_path, landscape(), jitter=0.3)
