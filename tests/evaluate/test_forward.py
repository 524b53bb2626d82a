"""Forwards on a GPU that does not exist: the worker that measures backwards measures them, and what
goes wrong with one costs no other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from generator.errors import NormforgeError
from generator.evaluate.gpu.evaluator import MeasuredEvaluator
from generator.evaluate.gpu.forward import FINALISTS, measure_forwards
from generator.evaluate.gpu.supervisor import Supervisor
from generator.kernels.forward import ForwardVariant
from generator.kernels.nvrtc import Compiled
from generator.operations import RMSNORM_FORWARD
from generator.problem import Problem
from generator.result import Result
from generator.space.forward_space import forward_variants
from generator.tuner import forward as forward_tune
from generator.tuner.forward import tune_forwards
from tests.support.fake_gpu import FakeGpu, ForwardLandscape, Log, Weather
from tests.support.fake_run import forks
from tests.support.forward import H200

PROBLEM = Problem.parse("4096x1024:bf16")
WITH_RESIDUAL = replace(PROBLEM, residual="bf16")
VARIANTS = list({v.id: v for v in forward_variants(PROBLEM, H200)}.values())[:12]
RATIOS = [1.30, 1.12, 1.11, 1.05, 1.20, 1.25, 1.40, 1.45, 1.15, 1.50, 1.22, 1.35]
FASTEST = sorted(range(12), key=RATIOS.__getitem__)


def compiled() -> Compiled:
    return Compiled(H200.arch, "", b"cubin", {}, "0", False, "")


ENTRIES: list[tuple[ForwardVariant, Compiled]] = [(variant, compiled()) for variant in VARIANTS]


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
    forks()
    supervisor = Supervisor(
        0, seconds, open_handler=gpu, method="forkserver", sleep=lambda seconds: None
    )
    with MeasuredEvaluator(H200, supervisor, RMSNORM_FORWARD) as found:
        yield found


def measured(tmp_path: Path, planted: ForwardLandscape, **options: Any) -> list[Result]:
    gpu = FakeGpu(Log(tmp_path / "log"), planted, Weather(**options))
    with evaluator(gpu, 2.0) as measuring:
        return measure_forwards(measuring, PROBLEM, ENTRIES)


def timed(results: list[Result]) -> list[int]:
    return [place for place, result in enumerate(results) if result.may_win]


def test_all_are_checked_and_the_fastest_timed_side_by_side(tmp_path: Path) -> None:
    results = measured(tmp_path, landscape())
    assert timed(results) == sorted(FASTEST[:FINALISTS])
    assert {result.outcome for result in results} == {"ok"}
    assert len({result.floor_us for result in results if result.may_win}) == 1, "one block"
    for place in timed(results):
        assert results[place].ratio == pytest.approx(RATIOS[place], rel=0.01)
        assert results[place].determinism == "verified"
        assert results[place].extra["floor_bytes"] == 2 * 4096 * 1024 * 2
        assert results[place].extra["condition"] == "rotation"
    jobs = [e for e in Log(tmp_path / "log").read() if e.get("event") == "begin"]
    assert {job["operation"] for job in jobs} == {"rmsnorm_forward"}
    for shape in (PROBLEM, WITH_RESIDUAL):
        kinds = [job["kind"] for job in jobs if job["problem"] == str(shape)]
        assert (kinds.count("accuracy"), kinds.count("determinism")) == (12, FINALISTS)
    assert "digest" not in {job["kind"] for job in jobs}, "nothing is summed over rows"


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
    results = measured(tmp_path, landscape(faults, residual))
    bad = results.pop(FASTEST[0])
    assert (bad.outcome, bad.may_win) == (outcome, False)
    assert bad.note
    assert {result.outcome for result in results} == {"ok"}
    assert sum(result.may_win for result in results) in (FINALISTS, FINALISTS - 1)


def test_one_that_breaks_the_worker_beside_others_drops_out_of_the_finals(tmp_path: Path) -> None:
    results = measured(tmp_path, landscape({FASTEST[0]: "late_sticky"}))
    # The block of all was lost, so that the first of the rule went on, and it among them.
    assert results[FASTEST[0]].outcome == "crashed"
    assert timed(results) == [place for place in range(FINALISTS) if place != FASTEST[0]]


def test_a_gpu_that_stays_noisy_gives_no_times(tmp_path: Path) -> None:
    with pytest.raises(NormforgeError, match="no clean numbers"):
        measured(tmp_path, landscape(), jitter=0.3)


@pytest.mark.slow
def test_the_choice_of_a_run_is_the_first_of_the_rule_within_one_percent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ratios = {v.id: r for v, r in zip(VARIANTS, [1.30, 1.055, 1.05, 1.2, *RATIOS[4:]], strict=True)}
    gpu = FakeGpu(Log(), ForwardLandscape(ratios), Weather(jitter=0.0005))

    def open_gpu(device: int, target: object) -> MeasuredEvaluator:
        forks()
        supervisor = Supervisor(device, open_handler=gpu, method="forkserver")
        return MeasuredEvaluator(H200, supervisor, RMSNORM_FORWARD)

    monkeypatch.setattr(forward_tune, "open_gpu", open_gpu)
    shapes = [PROBLEM, Problem.parse("512x1024:bf16+offset")]
    forwards = tune_forwards(shapes, H200, (0, 1), processes=2, choices=lambda p, t: VARIANTS)
    assert [entry.problem.M for entry in forwards.tuned] == [4096, 512]
    for entry in forwards.tuned:
        assert (entry.evidence, entry.variant) == ("measured", VARIANTS[1])
        assert entry.provenance["ratio"] == pytest.approx(1.055, abs=0.01)
        assert len(entry.provenance["tie"]) == 2
        assert (entry.provenance["candidates"], entry.provenance["faults"]) == (12, 0)
