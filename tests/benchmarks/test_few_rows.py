"""benchmarks.few_rows: which kernels it times for which rows, and what it says of the times."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import few_rows, shape_by_shape
from benchmarks.few_rows import candidates, measure, problems
from generator.evaluate.gpu.protocol import Candidate
from generator.operations import operation_of
from generator.paths import GENERATED
from generator.problem import Problem, load_problems
from normforge.api import Package

COMMITTED = GENERATED / "h200" / "rmsnorm_backward"


@pytest.fixture(scope="module")
def package() -> Package:
    return Package(COMMITTED)


def test_shapes_have_a_tuned_length_and_rows_that_nobody_tuned() -> None:
    """Narrow rows with fp32 weights are other shapes."""
    shapes = load_problems(
        "4096x512:bf16,3x512:bf16:fp32,3x512:fp16,4096x768:bf16:fp32,4096x8:fp32"
    )
    package: Any = SimpleNamespace(table=SimpleNamespace(tuned=shapes))
    found = problems(package, (3, 4096))
    assert sorted(map(str, found)) == ["3x512:bf16", "3x8:fp32", "4096x512:fp16"]


def test_every_kernel_that_serves_the_shape_is_timed_once(package: Package) -> None:
    for problem in problems(package, (3,)):
        found = list(candidates(package, problem))
        files = [kernel.file for _, kernel in found]
        assert len(files) == len(set(files))
        assert {how for how, _ in found} == {"tuned", "fallback"}
        choice = package.table.choose(problem.M, problem.N, problem.dtype, problem.weight_dtype)
        assert choice.kernel is not None and choice.kernel.file in files
        for how, kernel in found:
            assert kernel.spec.N == problem.N if how == "tuned" else not kernel.spec.exact
            assert (kernel.spec.dtype, kernel.spec.residual) == (problem.dtype, "")


class Session:
    """Times that are made up: the floor takes 2 µs, kernels 4, 5, … and ATen 3."""

    def __init__(self, problem: Problem) -> None:
        self.facts: dict[str, Any] = {}
        inputs = operation_of(problem).make_inputs(problem, torch.device("cpu"))
        self.timer = SimpleNamespace(sets=lambda nbytes: 2, block=self._block)
        self._workload = SimpleNamespace(
            floor_bytes=1,
            bench=lambda candidate: candidate,
            operations=lambda benches, sets: [["floor"] * sets, *([b] * sets for b in benches)],
            sets=lambda number: [(inputs, {})] * number,
        )

    def workload(self, problem: Problem) -> Any:
        return self._workload

    def _block(self, operations: Sequence[Sequence[Any]], rounds: int) -> list[list[float]]:
        floor, *kernels, atens = operations
        assert all(len(operation) == 2 for operation in operations), "a call for each set"
        assert floor[0] == "floor" and callable(atens[0])
        assert all(isinstance(kernel[0], Candidate) and kernel[0].cubin for kernel in kernels)
        times = [2.0, *(4.0 + place for place in range(len(kernels))), 3.0]
        return [[us] * rounds for us in times]


def test_a_row_has_the_ratio_of_each_kernel_and_names_the_chosen_one(package: Package) -> None:
    problem = Problem.parse("3x8192:fp16")
    session: Any = Session(problem)
    row = measure(COMMITTED, package, problem, session)
    assert (row["floor_us"], row["aten"], row["sets"]) == (2, 1.5, 2)
    ratios = [kernel["ratio"] for kernel in row["kernels"]]
    assert ratios == [2 + place / 2 for place in range(len(ratios))]
    assert row["chosen"] in {kernel["kernel"] for kernel in row["kernels"]}


def test_used_up_seconds_leave_shapes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = SimpleNamespace(monotonic=lambda: float(len(measured)))
    measured: list[str] = []

    def measure(_: Any, __: Any, problem: Problem, *___: Any) -> dict[str, Any]:
        measured.append(str(problem))
        return {"aten": 1.0, "kernels": [{"ratio": 2.0, "how": "tuned"}]}

    for module in (few_rows, shape_by_shape):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(few_rows, "open_session", lambda *_: SimpleNamespace(facts={}))
    monkeypatch.setattr(few_rows, "target_of", lambda *_: None)
    monkeypatch.setattr(few_rows, "machine", lambda *_, **__: {})
    monkeypatch.setattr(few_rows, "measure", measure)
    out = tmp_path / "few.json"
    arguments = ["--module", str(COMMITTED), "--out", str(out), "--rows", "3"]
    assert few_rows.main([*arguments, "--seconds", "3.5"]) == 1
    assert len(json.loads(out.read_text())["rows"]) == 3
    assert few_rows.main([*arguments, "--resume"]) == 0
    wanted = [str(problem) for problem in problems(Package(COMMITTED), (3,))]
    assert [row["shape"] for row in json.loads(out.read_text())["rows"]] == wanted == measured


@pytest.mark.parametrize("module", ["nowhere", str(COMMITTED)])
def test_without_a_package_or_a_gpu_it_is_a_sentence(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert few_rows.main(["--module", module, "--out", "none.json"]) == 2
    said = capsys.readouterr().err
    assert "is no package" in said if module == "nowhere" else "needs a CUDA GPU" in said
