"""Tests of joining results files that several GPUs of a host measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.merge import main, merged
from benchmarks.results import SAME
from generator.disk import read_json
from generator.errors import NormforgeError


def part(folder: Path, uuid: str, rows: list[dict[str, Any]], **facts: Any) -> Path:
    """A results file with the rows of one GPU."""
    environment = {
        **{name: f"the {name}" for name in SAME if name not in ("module", "uuid")},
        **{"uuid": uuid, "date": "2026-11-28", "module": {"digest": "0123"}},
        **facts,
    }
    path = folder / f"{uuid}.json"
    path.write_text(json.dumps({"environment": environment, "rows": rows}), encoding="utf-8")
    return path


def row(M: int, N: int, us: float) -> dict[str, Any]:
    return {"M": M, "N": N, "dtype": "bf16", "weight_dtype": "bf16", "ours_us": us}


def test_rows_of_all_files_are_sorted_and_say_which_gpu_measured_them(tmp_path: Path) -> None:
    first = part(tmp_path, "GPU-a", [row(8, 512, 1.0), row(8, 256, 2.0)], date="2026-11-29")
    second = part(tmp_path, "GPU-b", [row(4, 512, 3.0)])
    assert main([str(first), str(second), "--out", str(tmp_path / "all.json")]) == 0
    document = read_json(tmp_path / "all.json")
    found = [(r["M"], r["N"], r["ours_us"], r["uuid"]) for r in document["rows"]]
    assert found == [(8, 256, 2.0, "GPU-a"), (4, 512, 3.0, "GPU-b"), (8, 512, 1.0, "GPU-a")]
    environment = document["environment"]
    assert environment["uuid"] == ["GPU-a", "GPU-b"] and environment["date"] == "2026-11-28"
    assert environment["commit"] == "the commit"


def test_rows_that_name_their_shape_are_joined_too(tmp_path: Path) -> None:
    of_other = "layernorm_backward:16x1024:bf16"
    found = ("64x1024:bf16", "8x1024:bf16+offset", of_other, "8x1024:bf16")
    rows = [[{"shape": shape}] for shape in found]
    paths = [part(tmp_path, f"GPU-{i}", each) for i, each in enumerate(rows)]
    shapes = [each["shape"] for each in merged(paths)["rows"]]
    assert shapes == ["8x1024:bf16", "8x1024:bf16+offset", of_other, "64x1024:bf16"]


@pytest.mark.parametrize("name", [name for name in SAME if name != "uuid"])
def test_files_that_were_measured_otherwise_are_refused(tmp_path: Path, name: str) -> None:
    first = part(tmp_path, "GPU-a", [row(8, 256, 1.0)])
    second = part(tmp_path, "GPU-b", [row(8, 512, 1.0)], **{name: {"digest": "another"}})
    with pytest.raises(
        NormforgeError, match=f"GPU-b.json and .*differ in the environment's {name}"
    ):
        merged([first, second])


def test_a_shape_in_two_files_is_refused(tmp_path: Path) -> None:
    paths = [part(tmp_path, f"GPU-{i}", [row(8, 256, 1.0)]) for i in range(2)]
    with pytest.raises(NormforgeError, match="repeats 8x256:bf16: leave it out"):
        merged(paths)


def test_what_is_no_part_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = part(tmp_path, "GPU-a", []), tmp_path / "bad.json"
    documents = ("", "[]", '{"rows": []}', '{"environment": {"uuid": ["GPU-a"]}, "rows": []}')
    for text in documents:
        bad.write_text(text, encoding="utf-8")
        assert main([str(good), str(bad), "--out", str(tmp_path / "all.json")]) == 2
        assert "bad.json is no results file of one GPU" in capsys.readouterr().err
    assert not (tmp_path / "all.json").exists()
