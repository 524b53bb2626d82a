"""benchmarks/scaling.py: what it reads, compares and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scaling import agreement, main
from generator.problem import Problem


def run(seconds: float, *rows: dict[str, Any], **facts: Any) -> dict[str, Any]:
    document = {"gpu": "NVIDIA H200", "evidence": "measured", "seconds": seconds}
    return {**document, "interrupted": False, "shapes": list(rows), **facts}


def row(M: int, variant: str, ratio: float, **options: Any) -> dict[str, Any]:
    shape = str(Problem(M, 1024, "bf16", "bf16", **options))
    return {"shape": shape, "variant": variant, "us": 10.0, "ratio": ratio, "trials": 400}


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
    ("first", "second", "expected"),
    [
        (("a", 1.0), ("a", 2.0), "same"),
        (("a", 1.0), ("b", 1.01), "tie"),
        (("a", 1.02), ("b", 1.0), "differs"),
    ],
)
def test_tie_is_one_percent(
    first: tuple[str, float], second: tuple[str, float], expected: str
) -> None:
    assert agreement(row(1, *first), row(1, *second)) == expected


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
