"""Tests of the loop over shapes, on a clock that only measuring moves."""

from __future__ import annotations

import json
from argparse import Namespace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import shape_by_shape
from benchmarks.shape_by_shape import measure_shapes
from generator.errors import NormforgeError
from generator.problem import Problem

PROBLEMS = [Problem.parse(f"{M}x256:bf16") for M in (8, 16, 32, 64)]
SHAPES = [str(problem) for problem in PROBLEMS]
DOCUMENT = {"environment": {"gpu": "a", "date": "1"}, "rounds": (1, 2)}


class Loop:
    """Runs the loop; each shape takes as many seconds as `takes` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
        self.out, self.now, self.measured = out, 0.0, list[str]()
        self.takes = dict.fromkeys(SHAPES, 1.0)
        self.lost: set[str] = set()
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(shape_by_shape, "time", clock)

    def measure(self, problem: Problem) -> dict[str, Any] | None:
        self.now += self.takes[str(problem)]
        self.measured.append(str(problem))
        return None if str(problem) in self.lost else {"us": self.now}

    def run(self, until: float = inf, resume: bool = False, **facts: Any) -> Any:
        args = Namespace(out=self.out, resume=resume)
        document = {**DOCUMENT, **facts}
        return measure_shapes(
            args, until, PROBLEMS, document, self.measure, lambda row: row["shape"]
        )

    def rows(self) -> list[str]:
        return [row["shape"] for row in json.loads(self.out.read_text())["rows"]]


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Loop:
    return Loop(monkeypatch, tmp_path / "out.json")


def test_every_shape_is_measured_told_and_written(
    loop: Loop, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, left = loop.run()
    assert (loop.measured, left) == (SHAPES, 0)
    assert rows == [{"shape": shape, "us": 1.0 + i} for i, shape in enumerate(SHAPES)]
    document = json.loads(loop.out.read_text())
    assert document == {**DOCUMENT, "rounds": [1, 2], "rows": rows}
    assert capsys.readouterr().err.splitlines() == SHAPES


def test_no_shape_is_begun_that_would_not_end_in_time(
    loop: Loop, capsys: pytest.CaptureFixture[str]
) -> None:
    loop.takes[SHAPES[1]] = 4.0
    # After 1 + 4 seconds another one may take 4 again: until 9 it may, until 8.9 not.
    assert loop.run(until=8.9)[1] == 2 and loop.rows() == SHAPES[:2]
    assert "2 shapes are left: the same command with --resume" in capsys.readouterr().err
    loop.now = 0.0
    assert loop.run(until=9.0)[1] == 1 and loop.rows() == SHAPES[:3]


def test_a_stopped_run_goes_on_and_keeps_its_rows(loop: Loop) -> None:
    loop.run(until=1.0)
    before = json.loads(loop.out.read_text())["rows"]
    assert [row["shape"] for row in before] == SHAPES[:1]
    rows, left = loop.run(resume=True)
    assert (loop.measured, left, rows[:1]) == (SHAPES, 0, before)
    assert loop.run()[0] != rows, "without --resume all are measured again"
    assert loop.measured == 2 * SHAPES


def test_a_shape_that_cannot_be_measured_is_left(loop: Loop) -> None:
    loop.lost = {SHAPES[1]}
    rows, left = loop.run()
    assert left == 1 and [row["shape"] for row in rows] == [SHAPES[0], *SHAPES[2:]]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"environment": {"gpu": "b", "date": "1"}}, "another gpu"),
        ({"environment": {"gpu": "a", "date": "1", "driver": "1"}}, "does not say its driver"),
        ({"rounds": (1, 3)}, "another rounds"),
    ],
)
def test_rows_that_were_measured_otherwise_are_not_mixed(
    loop: Loop, facts: dict[str, Any], said: str
) -> None:
    loop.run(until=1.0)
    kept = loop.out.read_text()
    with pytest.raises(NormforgeError, match=f"{said} .*leave out --resume"):
        loop.run(resume=True, **facts)
    assert loop.out.read_text() == kept and loop.measured == SHAPES[:1]


def test_another_day_is_no_other_measurement(loop: Loop) -> None:
    loop.run(until=1.0)
    assert loop.run(resume=True, environment={"gpu": "a", "date": "2"})[1] == 0
    assert loop.measured == SHAPES
