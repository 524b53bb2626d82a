"""benchmarks.scaling: what it reads, compares and refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.scaling import agreement, compare, main
from generator.problem import Problem


def run(seconds: float, *rows: dict[str, Any], **facts: Any) -> dict[str, Any]:
    document = {"gpu": "NVIDIA H200", "evidence": "measured", "seconds": seconds}
    return {**document, "interrupted": False, "shapes": list(rows), **facts}


def row(M: int, variant: str, ratio: float, **options: Any) -> dict[str, Any]:
    shape = str(Problem(M, 1024, "bf16", "bf16", **options))
    made = {"variant": variant, "config": {"strategy": variant}}
    return {"shape": shape, **made, "us": 10.0, "ratio": ratio, "trials": 400}


def call(tmp_path: Path, one: dict[str, Any], many: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    for name, document in (("one", one), ("many", many)):
        (tmp_path / name).write_text(json.dumps(document))
    arguments = ["--one", str(tmp_path / "one"), "--many", str(tmp_path / "many")]
    out = tmp_path / "out.json"
    code = main([*arguments, "--devices", "4", "--out", str(out)])
    return code, json.loads(out.read_text()) if out.exists() else {}


def test_times_and_winners_are_compared(tmp_path: Path) -> None:
    one = run(400.0, row(1, "a", 1.10), row(2, "b", 1.10), row(3, "c", 1.10))
    many = run(100.0, row(3, "d", 1.12), row(2, "e", 1.105), row(1, "a", 1.2))
    code, result = call(tmp_path, one, many)
    assert code == 0
    assert result["ratio"] == 0.25
    assert result["seconds"] == [400.0, 100.0]
    assert result["agreement"] == {"same": 1, "tie": 1, "differs": 1}
    assert [r["agree"] for r in result["rows"]] == ["same", "tie", "differs"]


@pytest.mark.parametrize(
    ("same", "slower", "expected"),
    [(True, 2.0, "same"), (False, 1.01, "tie"), (False, 1 / 1.01, "tie"), (False, 0.98, "differs")],
)
def test_tie_is_one_percent(same: bool, slower: float, expected: str) -> None:
    assert agreement(same, slower) == expected


def test_what_the_judge_times_counts() -> None:
    """Of two runs on different GPUs the ratios say little; winners that are the same need none."""
    facts: dict[str, Any] = {"gpu": "h200", "evidence": "measured", "seconds": 4.0}
    one = facts | {"shapes": {"1": row(1, "a", 1.1), "2": row(2, "b", 1.1)}}
    many = facts | {"shapes": {"1": row(1, "a", 1.3), "2": row(2, "c", 1.3)}}
    asked = []

    def judge(shape: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> float:
        asked.append((shape, first["strategy"], second["strategy"]))
        return 1.005

    result = compare(one, many, 4, judge)
    assert asked == [("2", "b", "c")]
    assert result["agreement"] == {"same": 1, "tie": 1, "differs": 0}
    assert compare(one, many, 4)["agreement"] == {"same": 1, "tie": 0, "differs": 1}


def test_a_judge_needs_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    for name in ("one", "many"):
        (tmp_path / name).write_text(json.dumps(run(1.0, row(1, "a", 1.1))))
    arguments = ["--one", str(tmp_path / "one"), "--many", str(tmp_path / "many")]
    assert main([*arguments, "--devices", "4", "--judge", "0"]) == 2
    assert "--judge 0" in capsys.readouterr().err


def test_options_are_part_of_the_shape(tmp_path: Path) -> None:
    rows = (row(1, "a", 1.1), row(1, "b", 1.1, residual="bf16"))
    _, result = call(tmp_path, run(2.0, *rows), run(1.0, *reversed(rows)))
    assert result["agreement"] == {"same": 2, "tie": 0, "differs": 0}


@pytest.mark.parametrize(
    ("many", "says"),
    [
        (run(1.0, row(2, "a", 1.1)), "the two runs have other shapes"),
        (run(1.0, row(1, "a", 1.1), evidence="predicted"), "differ in evidence"),
        (run(1.0, row(1, "a", 1.1), interrupted=True), "interrupted or empty"),
        (run(1.0, row(1, "a", 1.1) | {"us": None}), "has no winner for 1x1024:bf16"),
        ({"seconds": 1.0}, "is no output of `tune.py --json`"),
    ],
)
def test_bad_input_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], many: dict[str, Any], says: str
) -> None:
    code, result = call(tmp_path, run(1.0, row(1, "a", 1.1)), many)
    error = capsys.readouterr().err
    assert code == 2 and not result
    assert says in error and error.count("\n") == 1
