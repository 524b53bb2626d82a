"""benchmarks.packages: which kernels it times, and what it says of the times."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks import packages
from generator.errors import NormforgeError
from generator.evaluate.gpu.protocol import Candidate
from generator.paths import GENERATED
from generator.problem import Problem
from generator.shape_lists import load_problems
from normforge.table import Table

H200, H100 = (GENERATED / gpu / "rmsnorm_backward" for gpu in ("h200", "h100"))


class Session:
    """Times that are made up: the floor takes 2 µs, the first kernel 4 and the second one 3. After
    a flush all take twice as long."""

    def __init__(self) -> None:
        self.loaded: list[Candidate] = []

    def workload(self, problem: Problem) -> Any:
        return SimpleNamespace(
            floor_bytes=1,
            bench=self._bench,
            operations=lambda benches, sets: [[us] * sets for us in (2.0, *benches)],
        )

    def _bench(self, candidate: Candidate) -> float:
        self.loaded.append(candidate)
        return 5.0 - len(self.loaded)


def timer(factor: float, sets: int) -> Any:
    def block(operations: Sequence[list[float]], rounds: int) -> list[list[float]]:
        assert all(len(operation) == sets for operation in operations), "a call for each set"
        return [[factor * us * (1 + place) for place in range(rounds)] for us, *_ in operations]

    return SimpleNamespace(sets=lambda nbytes: sets, block=block)


def test_both_packages_kernels_are_timed_under_both_conditions() -> None:
    problem = Problem.parse("4096x4096:bf16")
    kernels = {folder: packages.chosen(Table.load(folder), problem) for folder in (H200, H100)}
    session, timers = Session(), {"flush": timer(2.0, 1), "rotation": timer(1.0, 5)}
    row = packages.measure(cast(Any, session), timers, kernels, problem)
    cubins = [kernel.read_cubin(folder) for folder, kernel in kernels.items()]
    assert [candidate.cubin for candidate in session.loaded] == cubins
    assert cubins[0] != cubins[1]
    assert row["kernels"] == {"before": kernels[H200].file, "after": kernels[H100].file}
    for condition, floor, sets in (("flush", 32.0, 1), ("rotation", 16.0, 5)):
        told = row[condition]
        assert (told["sets"], told["floor_us"]) == (sets, floor)
        assert (told["before"], told["after"], told["after_over_before"]) == (2.0, 1.5, 0.75)
    said = packages.line({"shape": "4096x4096:bf16", **row})
    assert "flush: 2.000 -> 1.500 of the floor (0.750)" in said


def row_of(shape: str, after: float) -> dict[str, Any]:
    times = {"before": 1.0, "after": after, "after_over_before": after}
    return {"shape": shape, "flush": times, "rotation": {**times, "after_over_before": 1.0}}


def test_summary_has_means_and_names_what_became_slower() -> None:
    first, second = packages.summary([row_of("a", 0.5), row_of("b", 2.0)]).splitlines()
    assert "2 shapes, geometric means: before 1.0000, after 1.0000, after over before 1.0" in first
    assert first.endswith("slower by more than 1 %: b 2.000")
    assert second.endswith("slower by more than 1 %: none")
    (edge, _) = packages.summary([row_of("a", 1.01), row_of("b", 1.011)]).splitlines()
    assert edge.endswith("slower by more than 1 %: b 1.011")
    assert "after over before 0.7071" in packages.summary([row_of("a", 0.5), row_of("b", 1.0)])


def test_summary_of_nothing_has_no_means() -> None:
    assert packages.summary([]) == "no shape was measured"


def test_options_of_a_shape_choose_its_kernel() -> None:
    table = Table.load(H200)
    plain, option = load_problems("16384x4096:bf16,16384x4096:bf16+residual")
    assert not packages.chosen(table, plain).spec.residual
    assert packages.chosen(table, option).spec.residual
    whole = Problem.parse("524288x128:bf16", "rmsnorm_rope_backward")
    of_heads = Table.load(GENERATED / "h200" / whole.operation)
    assert packages.chosen(of_heads, whole).spec.rotation == ""
    with pytest.raises(NormforgeError, match=r"nothing like 524288x128:bf16\+rotary64 was tuned"):
        packages.chosen(of_heads, replace(whole, rotation="rotary64"))


def test_a_run_measures_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 0 is for the script that waits for the whole file. Rows beside another package are
    not kept."""
    measured: list[str] = []

    def measure(session: Any, timers: Any, kernels: Any, problem: Problem) -> dict[str, Any]:
        measured.append(str(problem))
        return row_of(str(problem), 1.0)

    facts = {"name": "NVIDIA H200", "sms": 132}
    session = SimpleNamespace(facts=facts, device=None)
    monkeypatch.setattr(packages, "open_session", lambda device: session)
    monkeypatch.setattr(packages, "Timer", lambda *_, **__: SimpleNamespace(facts=dict))
    monkeypatch.setattr(packages, "machine", lambda facts: {"gpu": facts["name"]})
    monkeypatch.setattr(packages, "measure", measure)
    out, shapes = tmp_path / "out.json", ["4096x4096:bf16", "16384x4096:bf16"]

    def run(number: int, *more: str, before: Path = H100) -> int:
        folders = ["--module", str(H200), "--before", str(before)]
        given = ["--shapes", ",".join(shapes[:number]), "--out", str(out), *more]
        return packages.main([*folders, *given])

    assert run(2, "--seconds", "-1") == 1 and not out.exists()
    assert run(1) == 0 and measured == shapes[:1]
    assert run(2, "--resume") == 0 and measured == shapes
    rows = json.loads(out.read_text())["rows"]
    assert [row["shape"] for row in rows] == shapes
    assert run(2, "--resume", before=H200.parent / "rmsnorm_invariant_backward") == 2


def test_a_shape_without_a_kernel_is_one_sentence() -> None:
    table = replace(Table.load(H200), fallback=())
    with pytest.raises(NormforgeError, match="a package has no kernel for it"):
        packages.chosen(table, Problem.parse("4096x1000:bf16"))


def test_bad_input_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*arguments: str) -> str:
        assert packages.main([*arguments, "--out", str(tmp_path / "out.json")]) == 2
        return capsys.readouterr().err

    assert "needs a CUDA GPU" in said("--module", str(H200), "--before", str(H100))
    assert "cannot be compared with itself" in said("--module", str(H200), "--before", str(H200))
    other = GENERATED / "h200" / "layernorm_backward"
    assert "is a package of layernorm" in said("--module", str(H200), "--before", str(other))
    assert "no readable table" in said("--module", str(H200), "--before", str(tmp_path))
