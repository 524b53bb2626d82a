"""benchmarks.cache_hints: what it chooses, what it times, its rows and its table."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from benchmarks import cache_hints, gpu
from benchmarks.cache_hints import BLOCKS, FOLLOWERS, HINTS, ROUNDS, check_bits, choose, follow
from generator.errors import NormforgeError
from generator.evaluate.gpu.session import Workload
from generator.kernels.geometry import Config
from generator.kernels.variant import make_variant
from generator.paths import REPOSITORY
from generator.problem import Problem, load_problems
from generator.result import Result
from generator.space.space import Space
from generator.studies.reader import Study
from generator.studies.records import Record
from generator.studies.storage import JOURNAL_NAME
from generator.target import Target

COMMITTED = REPOSITORY / "benchmarks/results/cache_hints_h200.json"
PROBLEM = Problem.parse("4096x1024:bf16")
FIXED: Config = {"strategy": "separate", "order": "turns", "pipeline": "bulk"}


def record(ratio: float, outcome: str = "ok", **config: int | str) -> Record:
    full = {**FIXED, "load_hint": "default", **config}
    return Record(full, str(ratio), Result(outcome, 10 * ratio, 10.0, ratio), "random", 0.0)


def study(
    *records: Record, problem: Problem = PROBLEM, gpu: str = "h200", evidence: str = "measured"
) -> Study:
    return Study(
        name="a study",
        number=0,
        problem=problem,
        gpu=gpu,
        sms=132,
        evidence=evidence,
        records=records,
        winner=None,
        finals=(),
        importance={},
    )


def test_winner_or_else_the_fastest_that_may_win_is_chosen_whatever_its_hint() -> None:
    studies = [
        study(
            record(1.07, pipeline="async", stages=1),
            record(1.02, strategy="atomic", stages=2),
            record(1.03, outcome="wrong", stages=3),
            record(1.06, stages=4),
            record(1.05, load_hint="evict_last", cluster=2, stages=5),
        ),
        study(record(1.0, stages=6), gpu="gb200"),
        study(record(1.0, stages=7), evidence="predicted"),
        study(record(1.0, stages=8), problem=Problem.parse("4096x2048:bf16")),
    ]
    expected = {**FIXED, "cluster": 2, "stages": 5}
    assert choose(studies, PROBLEM, "h200") == expected
    won: Any = SimpleNamespace(config=record(1.06, stages=4).config)
    studies[0] = replace(studies[0], winner=won)
    assert choose(studies, PROBLEM, "h200") == {**FIXED, "stages": 4}


@pytest.mark.parametrize(
    ("studies", "says"),
    [
        ([study(record(1.1), gpu="gb200")], "no study measured 4096x1024:bf16 on h200"),
        ([study(record(1.1), evidence="predicted")], "no study measured 4096x1024:bf16 on h200"),
        ([study(record(1.1, strategy="atomic"))], "4096x1024:bf16 has no config that may win"),
    ],
)
def test_shape_without_a_config_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    studies: list[Study],
    says: str,
) -> None:
    with pytest.raises(NormforgeError, match=says):
        choose(studies, PROBLEM, "h200")
    monkeypatch.setattr(cache_hints, "read_studies", lambda where: studies)
    refused(tmp_path, capsys, says, "--shapes", str(PROBLEM))


def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], says: str, *arguments: str) -> None:
    out = tmp_path / "out.json"
    assert cache_hints.main([*arguments, "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("cache_hints.py: ") and says in said and said.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--shapes", "4096x:bf16"), "malformed shape '4096x:bf16'"),
        (("--shapes", ","), "names no shape"),
        (("--gpu", "z80"), "unknown GPU 'z80'"),
    ],
)
def test_bad_input_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    refused(tmp_path, capsys, says, *arguments)


def test_missing_studies_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for where in (tmp_path, tmp_path / JOURNAL_NAME, tmp_path / f"{JOURNAL_NAME}.xz"):
        refused(tmp_path, capsys, f"no studies in {tmp_path}", "--studies", str(where))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cache_hints, "read_studies", lambda where: [study(record(1.1))])
    refused(tmp_path, capsys, "PyTorch sees none", "--shapes", str(PROBLEM))


class FakeTimer:
    """Runs what it times. Block i of all says i µs, and 2 more for the second operation."""

    def __init__(self) -> None:
        self.blocks = 0

    def block(self, operations: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
        for operation in operations:
            operation()
        self.blocks += 1
        return [[self.blocks + 2.0 * i] * rounds for i in range(len(operations))]


class FakeBench:
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


@pytest.fixture
def workload() -> Workload:
    return Workload(Problem.parse("6x16:bf16"), torch.device("cpu"))


def test_every_follower_runs_behind_floor_and_kernel(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed: list[tuple[str, float]] = []

    def spy(name: str, follower: Callable[..., object]) -> Callable[..., object]:
        def run(dx: torch.Tensor, extra: Any) -> None:
            followed.append((name, float(dx[0, 0])))
            follower(dx, extra)

        return run

    spied = {name: spy(name, follower) for name, follower in FOLLOWERS.items()}
    monkeypatch.setattr(cache_hints, "FOLLOWERS", spied)
    benches = {h: FakeBench(workload, i + 5.0, []) for i, h in enumerate(HINTS)}
    rows = follow(cast(Any, FakeTimer()), workload, cast(Any, benches))
    workload.floor()
    floor = float(workload.outputs["dx"].tensor[0, 0])
    pairs = [us for hint in (5.0, 6.0) for us in [floor, hint] * BLOCKS]
    assert followed == [(name, us) for name in FOLLOWERS for us in pairs]
    assert [row["follower"] for row in rows] == list(FOLLOWERS)
    assert rows[0] == {
        "follower": "nothing",
        "floor_us": [2.0, 5.0],
        "default_us": 4.0,
        "evict_last_us": 7.0,
    }


def test_followers_give_what_they_say(workload: Workload) -> None:
    dx = workload.outputs["dx"].tensor.normal_()
    extra = cache_hints.make_extra(dx)
    reads: dict[str, tuple[str, torch.Tensor]] = {
        "torch.add(dx, r, out=o)": ("o", dx + extra["r"]),
        "torch.mm(dx, w), w (N, N)": ("o", dx @ extra["square"]),
        "torch.mm(dx, w), w (N, N/4)": ("part", dx @ extra["narrow"]),
        "torch.add(r, r, out=o)": ("o", 2 * extra["r"]),
    }
    for name, (out, expected) in reads.items():
        FOLLOWERS[name](dx, extra)
        torch.testing.assert_close(extra[out], expected)
    more = dx + 1.0
    FOLLOWERS["dx.add_(1.0)"](dx, extra)
    assert torch.equal(dx, more)


def test_other_bits_with_the_hint_are_refused(workload: Workload) -> None:
    ran: list[float] = []
    same: Any = {hint: FakeBench(workload, 5.0, ran) for hint in HINTS}
    check_bits(workload, same)
    assert ran == [5.0, 5.0]
    with pytest.raises(NormforgeError, match=r"6x16:bf16: dx or dw has other bits"):
        check_bits(workload, same | {"evict_last": FakeBench(workload, 5.5, ran)})


def test_table_says_what_the_hint_gains() -> None:
    row = {"shape": "4096x1024:bf16", "follower": "nothing", "floor_us": [20.0, 20.5]}
    _, line = cache_hints.table([{**row, "default_us": 23.0, "evict_last_us": 22.0}]).splitlines()
    assert line.split() == ["4096x1024:bf16", "nothing", "20.00", "+3.00", "+1.50", "1.50"]


def test_document_is_written_and_the_table_printed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    workload: Workload,
) -> None:
    facts = {"name": "NVIDIA H200", "sms": 132, "driver": "1", "cuda_driver": "2", "torch": "3"}
    session = SimpleNamespace(facts=facts, timer=FakeTimer(), workload=lambda problem: workload)
    loaded: list[tuple[Config, str]] = []

    def load(workload: Workload, config: Config, hint: str, target: Target) -> FakeBench:
        loaded.append((config, hint))
        return FakeBench(workload, 5.0, [])

    monkeypatch.setattr(cache_hints, "read_studies", lambda where: [study(record(1.1))])
    monkeypatch.setattr(gpu, "Session", lambda device: session)
    monkeypatch.setattr(cache_hints, "load", load)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    out = tmp_path / "out.json"
    assert cache_hints.main(["--shapes", str(PROBLEM), "--out", str(out)]) == 0
    assert loaded == [(FIXED, hint) for hint in HINTS]
    written, committed = json.loads(out.read_text()), json.loads(COMMITTED.read_text())
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(FOLLOWERS)
    assert written["rows"][0]["shape"] == str(PROBLEM) and written["rows"][0]["config"] == FIXED
    assert (written["blocks"], written["rounds"]) == (BLOCKS, ROUNDS)
    assert written["environment"].keys() == committed["environment"].keys() - {"note"}
    assert written.keys() == committed.keys()
    assert {tuple(row) for row in committed["rows"]} == {tuple(row) for row in written["rows"]}
    session.facts = facts | {"name": "NVIDIA GB200", "sms": 152}
    out.unlink()
    refused(tmp_path, capsys, "this machine has a NVIDIA GB200", "--shapes", str(PROBLEM))


def test_committed_result_is_of_legal_configs(space: Space, target: Target) -> None:
    document = json.loads(COMMITTED.read_text())
    rows = document["rows"]
    shapes = list(map(str, load_problems(cache_hints.SHAPES)))
    assert [(r["shape"], r["follower"]) for r in rows] == [
        (s, f) for s in shapes for f in FOLLOWERS
    ]
    for row in rows:
        assert "load_hint" not in row["config"]
        problem = Problem.parse(row["shape"])
        for hint in HINTS:
            full = space.normalize({**row["config"], "load_hint": hint}, problem, target)
            assert full["load_hint"] == hint and not space.reject(full, problem, target)
            assert make_variant(full, problem).determinism != "none"
        assert len(row["floor_us"]) == len(HINTS)
