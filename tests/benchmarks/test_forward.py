"""benchmarks.forward: what a row has of each contender, and which rows are not mixed."""

from __future__ import annotations

import json
from argparse import Namespace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import forward
from generator.errors import NormforgeError
from generator.operations.rmsnorm_forward import EPS, ForwardInputs
from generator.paths import GENERATED
from generator.problem import Problem
from generator.shape_lists import load_problems
from normforge.serve.reference import reference_forward
from tests.support.comparison import CpuTimer
from tests.support.operators import operators_of

FACTS = {"name": "NVIDIA H200", "sms": 132, "driver": "1", "cuda_driver": "2", "torch": "3"}
MODULE = GENERATED / "h200" / "rmsnorm_backward"


def test_resume_keeps_rows_of_the_same_gpu_and_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []

    def measure(problem: Problem, *_: object) -> dict[str, Any]:
        measured.append(str(problem))
        return {"shape": str(problem), "copy_us": 1.0, "cells": {"ours": {"ratio": 1.0}}}

    monkeypatch.setattr(forward, "measure", measure)
    args = Namespace(out=tmp_path / "out.json", resume=True)

    def run(shapes: str, module: Path = MODULE, **other: str) -> int:
        session: Any = SimpleNamespace(facts=FACTS | other, timer=None)
        return forward.compare(load_problems(shapes), module, session, args, inf)

    assert run("4096x256:bf16") == 0
    assert run("4096x256:bf16,4096x512:bf16") == 0
    assert measured == ["4096x256:bf16", "4096x512:bf16"]
    kept = args.out.read_text()
    assert [row["shape"] for row in json.loads(kept)["rows"]] == measured
    with pytest.raises(NormforgeError, match=r"another gpu .*leave out --resume"):
        run("4096x1024:bf16", name="NVIDIA H100")
    with pytest.raises(NormforgeError, match=r"another module .*leave out --resume"):
        run("4096x1024:bf16", GENERATED / "h100" / "rmsnorm_backward")
    assert args.out.read_text() == kept


class Timer(CpuTimer):
    """Keeps the operators of the first operation, which is the floor, and its result."""

    def block(self, operations: list[Any], rounds: int) -> list[list[float]]:
        if len(operations) > 1:
            self.floor = operators_of(operations[0])
            self.copies = [operations[0]() for _ in range(2)]
        return super().block(operations, rounds)


def test_a_row_has_times_over_a_copy_and_the_error_of_all_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last row of one contender is an eighth off."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    seen: list[ForwardInputs] = []
    wanted: list[float] = []

    def contenders(package: Any, inputs: ForwardInputs, timer: Any) -> dict[str, Any]:
        assert inputs.weight is not None
        seen.append(inputs)
        y, _ = reference_forward(inputs.x, inputs.weight, EPS)
        off, lost = y.clone(), y.clone()
        off[-1] *= 1.125
        lost[0, 0] = float("nan")
        wanted.append(float(0.125 * y[-1].norm() / y.norm()))
        return {
            "off": lambda: lambda: (off,),
            "refuses": lambda: (_ for _ in ()).throw(ImportError("no wheel")),
            "lost": lambda: lambda: (lost,),
            "ours_residual": lambda: lambda: (off,),
            "ours": lambda: lambda: (y,),
        }

    monkeypatch.setattr(forward, "contenders", contenders)
    monkeypatch.setattr(forward, "host_time", lambda call: float(call()[0][-1, -1]))
    timer, nobody = Timer(), SimpleNamespace(table=None)
    problem = Problem.parse("8x64:fp32")
    row = forward.measure(problem, nobody, timer)  # type: ignore[arg-type]
    (inputs,) = seen
    assert timer.floor == ["mul"], "it reads x, writes as much, and allocates nothing"
    assert torch.equal(timer.copies[0], inputs.x * 1.5)
    assert timer.copies[0].data_ptr() == timer.copies[1].data_ptr() != inputs.x.data_ptr()
    cells = row["cells"]
    assert cells["off"]["error_y"] == pytest.approx(wanted[0], rel=1e-5)
    assert cells["ours"]["error_y"] < 1e-7
    assert cells["refuses"] == {"reason": "ImportError: no wheel"}
    assert cells["lost"]["reason"] == "ValueError: y has numbers that are not finite"
    assert "us" not in cells["lost"], "it is not timed"
    # The floor takes 100 µs, and whoever is timed a microsecond more than the one before.
    assert row["copy_us"] == 100.0
    for name, us in (("off", 101.0), ("ours_residual", 102.0), ("ours", 103.0)):
        assert (cells[name]["us"], cells[name]["ratio"]) == (us, us / 100)
    assert cells["off"]["host_us"] == pytest.approx(1.125 * cells["ours"]["host_us"])


def test_means_are_over_the_shapes_that_a_contender_serves() -> None:
    def row(**ratios: float | None) -> dict[str, Any]:
        cells = {name: {"ratio": r} if r else {"reason": "no"} for name, r in ratios.items()}
        return {"shape": "", "copy_us": 1.0, "cells": cells}

    said = forward.summary([row(ours=1.0, quack=None), row(ours=4.0, quack=9.0)])
    assert said.endswith("ours 2.000 (2 shapes), quack 9.000 (1 shapes)")
