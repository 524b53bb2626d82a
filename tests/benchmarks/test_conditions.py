"""benchmarks.conditions: which configs it takes, what it times how, and what it makes of the times.
The answers are worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from benchmarks import conditions
from benchmarks.conditions import FINALS, TRIALS, families, halves, spread, summary, tau
from benchmarks.repeatability import measured_studies
from generator.evaluate.gpu.rotation import FLUSH, ROTATION, Timed
from generator.kernels.geometry import Config
from generator.paths import results_of
from generator.problem import Problem
from generator.shape_lists import load_problems
from tests.support.fake_clock import FakeClock

FACTS = {
    "name": "NVIDIA H200",
    "sms": 132,
    "driver": "580.1",
    "cuda_driver": "13.0",
    "torch": "2.11.0",
}


def config(strategy: str, threads: int = 32, **more: object) -> Config:
    knobs = {"order": "turns", "pipeline": "bulk", "cluster": 1, "rows_per_cta": 2}
    return cast(Config, {"strategy": strategy, "threads_per_row": threads, **knobs, **more})


def study(*configs: Config) -> Any:
    records = [SimpleNamespace(config=each) for each in configs]
    problem = Problem.parse("64x256:bf16")
    winner = SimpleNamespace(config=configs[0])
    return SimpleNamespace(problem=problem, winner=winner, ranked=records, gpu="h200")


def test_the_winner_comes_first_and_families_once() -> None:
    winner, same = config("separate", load_hint="default"), config("separate", stages=5)
    wide, other = config("separate", 64), config("mailbox")
    found = study(winner, same, wide, other)
    found.ranked = [SimpleNamespace(config=each) for each in (other, same, winner, wide)]
    assert families(found) == [winner, other, wide]
    assert families(found, 2) == [winner, other]


@pytest.mark.parametrize(
    ("one", "other", "is_"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 40], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        ([1, 2, 3, 4], [1, 2, 4, 3], 4 / 6),  # five pairs agree, one does not
        ([1, 2, 3], [1, 1, 2], 2 / 3),  # a tie says nothing
    ],
)
def test_tau_by_hand(one: Sequence[float], other: Sequence[float], is_: float) -> None:
    assert tau(one, other) == pytest.approx(is_)


def test_noise_and_halves_by_hand() -> None:
    assert spread([[1.0, 1.2], [2.0, 2.0], [1.0, 1.0]]) == 0.0
    assert spread([[0.9, 1.1]]) == pytest.approx(0.2 / 2**0.5)
    # Blocks 0 and 2 rank the first one first, blocks 1 and 3 the second one.
    assert halves([[1.0, 3.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0]]) == -1.0
    assert halves([[1.0, 1.5, 1.0, 1.5], [2.0, 2.0, 2.0, 2.0]]) == 1.0


def test_a_summary_by_hand() -> None:
    """Two families with and without the hint. Under the flush it wins by 10 %, under rotation it
    loses by as much, and the trials of the flush choose what is slower there."""
    hints = ["evict_last", "default", "evict_last", "default"]
    flush, rotation = [1.0, 1.1, 1.2, 1.32], [1.1, 1.0, 1.32, 1.2]
    found = {
        name: {"trials": [[us] * 4 for us in row], "finals": [[us] * 3 for us in row]}
        for name, row in ((FLUSH, flush), (ROTATION, rotation))
    }
    said = summary(hints, found)
    assert said["tau"] == {"trials": round(2 / 6, 3), "finals": round(2 / 6, 3)}
    assert said[FLUSH]["hint"] == pytest.approx(1 / 1.1, abs=1e-4)
    assert said[ROTATION]["hint"] == 1.1
    assert said[FLUSH]["loss_in_finals"] == {FLUSH: 0.0, ROTATION: pytest.approx(0.1)}
    assert said[ROTATION]["loss_in_finals"] == {FLUSH: pytest.approx(0.1), ROTATION: 0.0}
    assert said[FLUSH]["tau_to_finals"] == {FLUSH: 1.0, ROTATION: round(2 / 6, 3)}
    assert said[FLUSH]["tau_halves"] == {"trials": 1.0, "finals": 1.0}
    assert said[FLUSH]["spread"] == {"trials": 0.0, "finals": 0.0}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """A machine on which the hint gains 10 % right after a flush, and costs as much elsewhere."""
    clock = FakeClock(monkeypatch)

    def bench_of(workload: object, made: Config, target: object) -> Any:
        return made

    def kernel(made: Config) -> Timed:
        hint = 0.9 if made["load_hint"] == "evict_last" else 1.0
        us = 20.0 + cast(int, made["threads_per_row"])

        def work() -> None:
            cold = clock.log[-1] == "flush"
            clock.log.append(str(made["load_hint"]))
            clock.now += us * (hint if cold else 1 / hint)

        return lambda: clock.do(work)

    class Workload:
        floor_bytes = 40 << 20

        def operations(self, benches: Sequence[Config], sets: int) -> list[list[Timed]]:
            floor = [cast(Timed, clock.operation("floor", 10.0))] * sets
            return [floor, *([kernel(made)] * sets for made in benches)]

    session = SimpleNamespace(
        device=torch.device("cpu"), facts=FACTS, workload=lambda problem: Workload()
    )
    monkeypatch.setattr(conditions, "bench_of", bench_of)
    monkeypatch.setattr(conditions, "cubin_of", lambda problem, made, _: made["load_hint"][:4])
    monkeypatch.setattr(conditions, "open_session", lambda device: session)
    found = study(config("separate", load_hint="evict_last"), config("mailbox", 64))
    monkeypatch.setattr(conditions, "measured_studies", lambda _, ps: dict.fromkeys(ps, found))
    return clock


def test_a_study_on_a_fake_machine(clock: FakeClock, tmp_path: Path) -> None:
    out = tmp_path / "conditions.json"
    assert conditions.main(["--out", str(out), "--shapes", "64x256:bf16"]) == 0
    document = json.loads(out.read_text(encoding="utf-8"))
    (row,) = document["rows"]
    assert row["shape"] == "64x256:bf16" and row["winner_hint"] == "evict_last"
    assert [entry["hint"] for entry in row["entries"]] == ["evict_last", "default"] * 2
    assert [entry["cubin"] for entry in row["entries"]] == ["evic", "defa"] * 2
    assert (row[FLUSH]["sets"], row[ROTATION]["sets"]) == (1, 6)
    assert row[FLUSH]["trials"] == [[r] * TRIALS for r in (4.68, 5.2, 7.56, 8.4)]
    assert row[FLUSH]["finals"] == [[r] * FINALS for r in (4.68, 5.2, 7.56, 8.4)]
    assert row[ROTATION]["trials"][:2] == [[5.77778] * TRIALS, [5.2] * TRIALS]
    assert row["summary"][FLUSH]["hint"] == 0.9
    assert row["summary"][ROTATION]["hint"] == pytest.approx(1 / 0.9, abs=1e-4)
    assert document["conditions"][ROTATION]["order"] == "balanced"
    assert row[FLUSH]["trial_seconds"] > 0


def test_what_is_left_is_said(clock: FakeClock, tmp_path: Path) -> None:
    out = tmp_path / "conditions.json"
    arguments = ["--out", str(out), "--shapes", "64x256:bf16", "--seconds", "0"]
    assert conditions.main(arguments) == 1
    assert not out.exists()


def test_the_default_shapes_have_families_in_the_committed_studies() -> None:
    """The H100's studies, the smaller file, have enough families that a rank says something."""
    problems = load_problems(conditions.SHAPES)
    assert len(problems) == 10
    studies = measured_studies(results_of("h100"), problems)
    for problem in problems:
        assert len(families(studies[problem])) == conditions.FAMILIES
