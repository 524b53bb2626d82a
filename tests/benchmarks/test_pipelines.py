"""benchmarks.pipelines: which configs it tries, and what it says of the times."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import pipelines
from generator.errors import NormforgeError
from generator.evaluate.gpu.rotation import FLUSH, ROTATION
from generator.problem import Problem
from generator.space.family import family_of
from generator.space.legal_configs import LegalConfigs
from generator.space.load import load_space
from tests.support.forward import H200
from tests.support.named_times import NamedTimes, NamedWorkload

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


def measured(monkeypatch: pytest.MonkeyPatch, fault: str = "") -> tuple[Any, list[NamedTimes]]:
    """A row of nine configs, of which config 1 has the fault, and the timers. In the trials they
    take 10, 9, … µs; in the finals the package's takes 2, under rotation 4, and of the others
    config 5 is the fastest, under rotation config 7. The floor takes 2 µs."""
    log: list[str] = []
    workload: Any = NamedWorkload(log)
    workload.bench = lambda candidate: "package"
    monkeypatch.setattr(pipelines, "bench_of", lambda own, config, target: f"{config['name']}")
    monkeypatch.setattr(pipelines, "fault_of", lambda bench, own: fault if bench == "1" else "")
    monkeypatch.setattr(pipelines, "make_variant", lambda config, problem: config["name"])
    monkeypatch.setattr(pipelines, "cubin_of", lambda problem, config, target: config["name"])
    trials = {str(number): [10.0 - number] for number in range(9)}
    others = {"floor": [2.0], "package": [2.0]}
    finals = {name: [9.0] for name in trials}
    timers = {
        FLUSH: [NamedTimes(log, others | times) for times in (trials, finals | {"5": [2.5]})],
        ROTATION: [NamedTimes(log, others | finals | {"7": [1.0], "package": [4.0]}, 3)],
    }

    class Switching:
        """The trials come first, one at a time, and then the finals."""

        def __init__(self, condition: str) -> None:
            self.own = timers[condition]

        def sets(self, set_bytes: int) -> int:
            return self.own[-1].number

        def block(self, operations: Any, rounds: int) -> list[list[float]]:
            return self.own[0 if len(operations) == 2 else -1].block(operations, rounds)

    session: Any = SimpleNamespace(workload=lambda problem: workload)
    kernel: Any = SimpleNamespace(file="kernel", spec=None, read_cubin=lambda folder: b"")
    configs: Any = [{"name": str(number)} for number in range(9)]
    both: Any = {condition: Switching(condition) for condition in timers}
    row = pipelines.measure(session, both, kernel, configs, PROBLEM, H200)
    return row, [timer for own in timers.values() for timer in own]


def test_the_fastest_of_the_trials_stand_beside_the_package_under_each_condition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row, (trials, *finals) = measured(monkeypatch)
    assert trials.blocks == [["floor", str(number)] for number in range(9)]
    names = ["floor", "package", *"876543"]
    assert [timer.blocks for timer in finals] == [[names] * pipelines.FINAL_BLOCKS] * 2
    assert (row["package"], row["tried"], row["cubins"]) == ("kernel", 9, [*"876543"])
    assert row["floor_us"] == {FLUSH: 2.0, ROTATION: 2.0}
    assert row["package_ratio"] == {FLUSH: 1.0, ROTATION: 2.0}
    assert row["best_ratio"] == {FLUSH: 1.25, ROTATION: 0.5}
    assert row["best"] == {FLUSH: {"name": "5"}, ROTATION: {"name": "7"}}
    assert [ratio for ratio, _ in row["trials"]] == [1.0 + number / 2 for number in range(9)]


def test_a_wrong_kernel_has_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NormforgeError, match="4096x4096:bf16: 1 is wrong: planted"):
        measured(monkeypatch, "planted")


@pytest.mark.parametrize(
    ("accuracy", "repeats", "said"),
    [("", "", ""), ("dx is off", "", "dx is off"), ("", "run 3 differs", "run 3 differs")],
)
def test_a_kernel_is_wrong_by_its_numbers_or_its_bits(
    monkeypatch: pytest.MonkeyPatch, accuracy: str, repeats: str, said: str
) -> None:
    asked: list[tuple[object, ...]] = []
    workload = SimpleNamespace(inputs="inputs", expected="expected", cancelling="cancelling")

    def check_accuracy(*given: object) -> Any:
        asked.append(given)
        return SimpleNamespace(fault=accuracy)

    monkeypatch.setattr(pipelines, "check_accuracy", check_accuracy)
    monkeypatch.setattr(
        pipelines, "check_repeats", lambda *given: (asked.append(given), repeats)[1]
    )
    bench: Any = "bench"
    assert pipelines.fault_of(bench, workload) == said
    runs = ("bench", "cancelling", pipelines.CHECKED_RUNS)
    assert asked == [("bench", "inputs", "expected"), runs][: 1 + (not accuracy)]


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
