"""Every results file says where its numbers come from."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import provenance
from benchmarks.comparison import describe
from benchmarks.peers import choose_peers
from benchmarks.provenance import commit, cubins_of, libraries, origin
from benchmarks.results import SAME, machine, module_facts
from generator.evaluate.gpu.rotation import ROTATION
from generator.evaluate.gpu.timer import Timer
from generator.paths import GENERATED, REPOSITORY
from normforge.table import FORWARD_TABLE, TABLE, Table
from tests.support.fake_clock import FakeClock

FACTS = {
    **{"name": "NVIDIA H200", "sms": 132, "uuid": "GPU-1", "bus_id": "0000:01"},
    **{"driver": "580.1", "cuda_driver": "13.0", "torch": "2.11.0"},
    **{"condition": "flush", "order": "balanced", "flush_bytes": 256 << 20},
}
MODULE = GENERATED / "h200" / "rmsnorm_backward"
WITHOUT_A_GPU = {"merge", "search_replay", "prediction", "rebuild", "pages", "goals", "report"}
"""Commands and modules whose documents have no times of their own."""


def test_a_file_names_the_gpu_itself_the_commit_and_the_libraries() -> None:
    found = machine(FACTS)
    assert (found["gpu"], found["uuid"], found["driver"]) == ("NVIDIA H200", "GPU-1", "580.1")
    assert found["commit"] == commit() and found["libraries"] == libraries()
    assert "condition" not in found, "nothing was timed by the session"
    timed = machine(FACTS, timed=True)
    assert (timed["condition"], timed["order"], timed["flush_bytes"]) == (
        "flush",
        "balanced",
        256 << 20,
    )
    assert "cuda-python" in found["libraries"] and "liger-kernel" not in found["libraries"]


def test_a_commit_with_changes_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"rev-parse": "0123456789ab", "status": ""}

    def git(which: str, *_: str) -> str:
        return said[which]

    monkeypatch.setattr(provenance, "_git", git)
    assert commit.__wrapped__() == "0123456789ab"
    said["status"] = " M benchmarks/harness.py"
    assert commit.__wrapped__() == "0123456789ab+changes"

    def fails(*_: str) -> str:
        raise subprocess.CalledProcessError(128, "git")

    monkeypatch.setattr(provenance, "_git", fails)
    assert commit.__wrapped__() == "unknown"


def test_the_commit_is_that_of_the_checkout() -> None:
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True
    )
    if head.returncode:
        pytest.skip("this is no Git checkout, or git is missing")
    assert head.stdout.startswith(commit.__wrapped__().partition("+")[0])


@pytest.mark.parametrize("table", [TABLE, FORWARD_TABLE])
def test_a_package_is_named_by_its_table_and_each_cubin(table: str) -> None:
    facts = module_facts(MODULE, table)
    assert re.fullmatch("[0-9a-f]{16}", facts["digest"])
    assert facts["cubins"] == cubins_of((MODULE / table).read_bytes())
    if table == TABLE:
        kernels = {kernel.file: kernel.digest for kernel in Table.load(MODULE).kernels()}
        assert facts["cubins"] == kernels and len(kernels) > 200


def test_a_comparison_says_how_it_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeClock(monkeypatch)
    timer = Timer(torch.device("cpu"), condition=ROTATION)
    others = [
        replace(peer, library=partial(str, peer.name)) for peer in choose_peers("cudnn,quack")
    ]
    peers = [*choose_peers("aten"), *others]
    found = describe(FACTS, timer, peers, {}, MODULE, "rmsnorm_backward")
    harness = found["harness"]
    assert (harness["condition"], harness["order"]) == ("rotation", "balanced")
    assert found["peers"]["aten"].startswith("torch ")
    versions = {name: said.split(", ")[0] for name, said in found["peers"].items()}
    assert versions == {**versions, "quack": "quack", "cudnn": "cudnn"}, "each has its own"
    assert {"uuid", "commit", "harness"} <= set(SAME), "rows of one file have one origin"
    assert origin(FACTS, timed=False).items() <= found.items()


def commands() -> list[Path]:
    """Modules of benchmarks/ that write results."""
    found = sorted((REPOSITORY / "benchmarks").rglob("*.py"))
    writes = re.compile(r"\b(?:write_json|show_json|Results|measure_shapes)\(")
    return [
        path
        for path in found
        if writes.search(path.read_text(encoding="utf-8"))
        and path.stem not in ("results", "shape_by_shape", "side_by_side")
        and not WITHOUT_A_GPU & {path.stem, path.parent.name}
    ]


@pytest.mark.parametrize("path", commands(), ids=lambda path: path.stem)
def test_every_benchmark_writes_its_origin(path: Path) -> None:
    text: Any = path.read_text(encoding="utf-8")
    assert re.search(r"\b(?:machine|this_machine|describe|environment)\(", text), path


def test_there_are_as_many_benchmarks_as_one_thinks() -> None:
    assert len(commands()) >= 15
