"""Tests of running a benchmark on several GPUs, with one that measures nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks import side_by_side
from generator.disk import read_json

COMMAND = """
import json, os, sys
from argparse import ArgumentParser
from pathlib import Path
parser = ArgumentParser()
for name in ("shapes", "out", "condition"):
    parser.add_argument(f"--{name}", required=True)
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()
gpu = os.environ["CUDA_VISIBLE_DEVICES"]
environment = {"uuid": f"GPU-{gpu}", "date": "1", "condition": args.condition}
rows = [{"shape": shape} for shape in args.shapes.split(",")]
if gpu != os.environ.get("WITHOUT"):
    Path(args.out).write_text(json.dumps({"environment": environment, "rows": rows}))
sys.exit(json.loads(os.environ.get("CODES", "{}")).get(gpu, 0))
"""
SHAPES = "8x256:bf16,4096x4096:bf16,4096x256:bf16,8192x4096:bf16"
GIVEN = ("--shapes", SHAPES, "--condition", "rotation")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder whose `benchmarks` has one command, and files of no other run."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "nothing.py").write_text(COMMAND)
    monkeypatch.setattr(side_by_side, "FOLDER", tmp_path / "benchmarks")
    monkeypatch.chdir(tmp_path)
    for name in ("PYTHONPATH", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def run(*arguments: str) -> int:
    return side_by_side.main([*arguments, "--out", "all.json"])


def test_every_gpu_measures_its_shapes_and_one_file_has_them_all(folder: Path) -> None:
    assert run("1,3", "nothing", *GIVEN) == 0
    rows = read_json(folder / "all.json")["rows"]
    # By size: 8192x4096, 4096x4096, 4096x256, 8x256.
    assert {row["shape"]: row["uuid"] for row in rows} == {
        "8192x4096:bf16": "GPU-1",
        "4096x4096:bf16": "GPU-3",
        "4096x256:bf16": "GPU-1",
        "8x256:bf16": "GPU-3",
    }
    environment = read_json(folder / "all.json")["environment"]
    assert environment["uuid"] == ["GPU-1", "GPU-3"] and environment["condition"] == "rotation"


def test_what_is_left_is_an_exit_code_and_failure_joins_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CODES", json.dumps({"1": 1}))
    monkeypatch.setenv("WITHOUT", "1")  # its seconds ended before the first shape
    assert run("0,1", "nothing", *GIVEN) == 1
    assert len(read_json(folder / "all.json")["rows"]) == 2
    (folder / "all.json").unlink()
    monkeypatch.setenv("CODES", json.dumps({"0": 1, "1": 2}))
    assert run("0,1", "nothing", *GIVEN) == 2
    assert not (folder / "all.json").exists()
    assert "nothing failed on GPU 1: it says why above" in capsys.readouterr().err


@pytest.mark.parametrize("resume", [False, True])
def test_rows_of_an_earlier_run_are_joined_only_on_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch, resume: bool
) -> None:
    assert run("0,1", "nothing", *GIVEN) == 0
    monkeypatch.setenv("WITHOUT", "1")
    assert run("0,1", "nothing", *GIVEN, *["--resume"] * resume) == 0
    gpus = {row["uuid"] for row in read_json(folder / "all.json")["rows"]}
    assert gpus == ({"GPU-0", "GPU-1"} if resume else {"GPU-0"})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("0,0", "nothing", *GIVEN), "GPUs are given as 0,1,2, each once"),
        (("0,a", "nothing", *GIVEN), "and not as 0,a"),
        (("0", "none", *GIVEN), "no benchmark is called none"),
        (("0,1,2,3,4", "nothing", *GIVEN), "--shapes has 4 shapes for 5 GPUs: name fewer"),
    ],
)
def test_bad_input_is_one_sentence(
    folder: Path, arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_gpus_are_those_that_this_process_may_see(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,GPU-5a")
    assert run("0,1", "nothing", *GIVEN) == 0
    assert read_json(folder / "all.json")["environment"]["uuid"] == ["GPU-7", "GPU-GPU-5a"]
    assert run("0,2", "nothing", *GIVEN) == 2
    assert "CUDA_VISIBLE_DEVICES=7,GPU-5a has no GPU 2" in capsys.readouterr().err


def test_cores_are_dealt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(2, 10)})
    assert [side_by_side.cores_of(process, 3) for process in range(3)] == [{2, 3}, {4, 5}, {6, 7}]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 6})
    assert [side_by_side.cores_of(process, 3) for process in range(3)] == [{5}, {6}, {5}]
