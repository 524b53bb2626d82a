"""benchmarks.flushes: what comes before and in an interval, who takes which inputs, its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from benchmarks import flushes
from benchmarks.flushes import (
    CONDITIONS,
    HINTS,
    Condition,
    check_bits,
    measure,
    operations,
)
from benchmarks.gpu import BLOCKS
from generator.errors import NormforgeError
from generator.evaluate.gpu.timer import Timer
from generator.evaluate.gpu.workload import Workload
from generator.operations.rmsnorm_backward import Inputs
from generator.problem import Problem
from tests.support.named_times import NamedTimes, NamedWorkload


@pytest.fixture
def workload() -> Workload:
    return Workload(Problem.parse("6x16:bf16"), torch.device("cpu"))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what conditions do on a GPU, in order."""
    said: list[str] = []

    class FakeCache:
        def __init__(self, *_: object) -> None: ...

        def flush(self, value: float) -> None:
            said.append("flush")

        def write(self, value: float) -> None:
            said.append("write")

    def begin(self: Any, device: torch.device, *, condition: str) -> None:
        self.cold, self.condition = FakeCache(), condition

    monkeypatch.setattr(Timer, "__init__", begin)
    monkeypatch.setattr(flushes, "READ_BYTES", 16)
    monkeypatch.setattr(Condition, "read_plainly", lambda self: said.append("read"))
    return said


@pytest.mark.parametrize(
    ("name", "happens"),
    [
        ("present", ["flush", "run"]),
        ("writes", ["write", "run"]),
        ("clean", ["flush", "read", "run"]),
        ("drained", ["flush", "run", "read"]),
    ],
)
def test_each_condition_does_what_it_says(log: list[str], name: str, happens: list[str]) -> None:
    timer = CONDITIONS[name](torch.device("cpu"))
    timed = timer.ending(lambda: log.append("run"))
    timer.prepare(1.0)
    timed()
    assert log == happens


class Bench:
    def __init__(self) -> None:
        self.ran: list[tuple[int, int]] = []

    def run(self, inputs: Inputs, *, instead: dict[str, torch.Tensor]) -> None:
        self.ran.append((inputs.x.data_ptr(), instead["dx"].data_ptr()))


def test_every_operation_has_a_call_for_each_set(workload: Workload) -> None:
    ours, seen = Bench(), []

    def bind(inputs: Inputs) -> Callable[[], tuple[torch.Tensor, ...]]:
        return lambda: (seen.append(inputs.x.data_ptr()), inputs.x)[1:]

    found = operations(workload, {"default": cast(Any, ours)}, {"peer": bind}, 3)
    assert {name: len(calls) for name, calls in found.items()} == dict.fromkeys(found, 3)
    assert list(found) == ["floor", "default", "peer"]
    for call in (*found["default"], *found["peer"]):
        call()
    xs, dxs = zip(*ours.ran, strict=True)
    assert len(set(xs)) == len(set(dxs)) == 3 and seen == list(xs), "all take the same sets"
    assert xs[0] == workload.inputs.x.data_ptr()
    assert dxs[0] == workload.outputs["dx"].tensor.data_ptr()
    found["floor"][1]()
    inputs, places = workload.sets(3)[1]
    assert torch.equal(places["dx"], inputs.x + inputs.dy)


class FixedBench:
    """Writes `value` to every element of dx and dw."""

    def __init__(self, workload: Workload, value: float, ran: list[float]) -> None:
        self.outputs = workload.outputs
        self.value, self.ran = value, ran

    def poison(self) -> None:
        self.outputs["dx"].poison()

    def run(self, inputs: object) -> None:
        self.ran.append(self.value)
        for out in self.outputs.values():
            out.tensor.fill_(self.value)


def test_other_bits_with_the_hint_are_refused(workload: Workload) -> None:
    ran: list[float] = []
    same: Any = {hint: FixedBench(workload, 5.0, ran) for hint in HINTS}
    check_bits(workload, same)
    assert ran == [5.0, 5.0]
    with pytest.raises(NormforgeError, match=r"6x16:bf16: dx or dw has other bits"):
        check_bits(workload, same | {"evict_last": FixedBench(workload, 5.5, ran)})


def test_ratios_are_those_within_a_round() -> None:
    class FakeTimer:
        blocks = 0

        def ending(self, operation: object) -> object:
            return operation

        def block(self, timed: Sequence[object], rounds: int) -> list[list[float]]:
            self.blocks += 1
            return [[10.0 * self.blocks] * rounds, [11.0 * self.blocks] * rounds]

    timer = FakeTimer()
    row = measure({"floor": [print], "ours": [print]}, cast(Any, timer))
    assert timer.blocks == BLOCKS
    assert row == {
        "sets": 1,
        "us": {"floor": 20.0, "ours": 22.0},
        "over_floor": {"floor": 1.0, "ours": 1.1},
    }


def test_a_row_has_both_hints_and_the_peers_that_serve_under_every_condition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The number of a condition is the microseconds that it adds to everybody."""
    log: list[str] = []
    workload = NamedWorkload(log, "inputs")
    alone = {"floor": 2.0, "default": 4.0, "evict_last": 3.0, "serves": 5.0}
    timers: Any = {
        name: NamedTimes(log, {who: [us + more] for who, us in alone.items()}, 1 + 2 * (more == 3))
        for more, name in enumerate(CONDITIONS)
    }

    def refuses(inputs: object) -> Any:
        raise RuntimeError("planted")

    made: list[dict[str, object]] = []
    monkeypatch.setattr(flushes, "bench_of", lambda own, config, target: config["load_hint"])
    monkeypatch.setattr(flushes, "check_bits", lambda own, benches: made.append(dict(benches)))
    monkeypatch.setattr(flushes, "cubin_of", lambda problem, config, _: config["load_hint"])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    session: Any = SimpleNamespace(workload=lambda problem: workload)
    peers: Any = {"serves": lambda inputs: workload.saying("serves"), "refuses": refuses}
    given: Any = (Problem.parse("6x16:bf16"), {"load_hint": "default"}, None, peers)
    row = flushes.measure_shape(session, timers, *given)
    assert made == [{hint: hint for hint in HINTS}], "equal bits are asked for"
    assert (row["hint"], row["cubins"]) == ("default", {hint: hint for hint in HINTS})
    for more, name in enumerate(CONDITIONS):
        assert row[name]["sets"] == timers[name].number
        assert row[name]["us"] == {who: us + more for who, us in alone.items()}
        ratios = {who: round((us + more) / (2.0 + more), 4) for who, us in alone.items()}
        assert row[name]["over_floor"] == ratios


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--shapes", "4096x:bf16"), "malformed shape '4096x:bf16'"),
        (("--shapes", "4096x1000:bf16"), "has no winner for 4096x1000:bf16"),
        (("--peers", "nobody"), "nobody"),
    ],
)
def test_bad_input_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    out = tmp_path / "out.json"
    assert flushes.main([*arguments, "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("flushes.py: ") and says in said and said.count("\n") == 1
    assert not out.exists()


def test_a_peer_that_would_overwrite_what_all_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peers = {name: SimpleNamespace(overwrites_dy=name == "theirs") for name in ("good", "theirs")}
    session = SimpleNamespace(timer=None)
    monkeypatch.setattr(flushes, "choose_peers", list)
    monkeypatch.setattr(flushes, "open_gpu", lambda *_: (session, None))
    monkeypatch.setattr(flushes, "load_peers", lambda *_: (peers, {}))
    assert flushes.main(["--out", str(tmp_path / "out.json")]) == 2
    assert "flushes.py: theirs would overwrite dy" in capsys.readouterr().err
