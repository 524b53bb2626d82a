"""benchmarks.errors: what it draws, what it takes for an error, and its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.comparison import load_module
from benchmarks.errors import (
    ELEMENTS,
    aten,
    composite,
    errors,
    in_fp32,
    main,
    normal_inputs,
    of_module,
    random_shapes,
    row,
    worst,
)
from generator.emulate import find_compiler
from generator.operations.rmsnorm_backward import Inputs
from generator.paths import GENERATED
from generator.problem import Problem
from normforge.serve.reference import reference_backward
from tests.support.entry_points import aten_on_cpu

CPU = torch.device("cpu")
COMMITTED = GENERATED / "h200" / "rmsnorm_backward"


def formula(inputs: Inputs) -> Any:
    return lambda: reference_backward(inputs.dy, inputs.x, inputs.rstd, inputs.weight)


def test_random_shapes_are_those_of_their_seed() -> None:
    shapes = random_shapes(6, 1)
    assert shapes == random_shapes(6, 1) != random_shapes(6, 2)
    assert len(shapes) == 30 and len({(p.dtype, p.weight_dtype) for p in shapes}) == 5
    assert all(p.M >= 1 and p.N >= 8 and p.M * p.N <= ELEMENTS for p in shapes)
    assert any(p.N % 64 for p in shapes)


@pytest.mark.parametrize("shape", ["300x64:fp32", "300x64:bf16", "300x64:bf16:fp32"])
def test_errors_are_those_of_the_rounding(shape: str) -> None:
    """They are ten times that where somebody is ten times off; the peers are PyTorch's."""
    problem = Problem.parse(shape)
    unit = {"bf16": 2**-9, "fp32": 2**-24}
    exact = normal_inputs(problem, CPU, 0)
    assert exact.x.dtype == exact.dy.dtype and 0.9 < float(exact.dy.float().std()) < 1.1

    def off(inputs: Inputs) -> Any:
        dx, dw = formula(inputs)()
        return lambda: (dx * (1 + 20 * unit[problem.dtype]), dw)

    with aten_on_cpu():
        calls = {"ours": formula, "off": off, "aten": aten, "composite": composite}
        found = errors(problem, calls, CPU)
    for name in ("ours", "aten", "composite"):
        assert 0.2 * unit[problem.dtype] < found[name]["dx"] < 2 * unit[problem.dtype]
        assert 0.2 * unit[problem.weight_dtype] < found[name]["dw"] < 4 * unit[problem.weight_dtype]
    assert found["off"]["dx"] > 10 * unit[problem.dtype]
    assert found["off"]["dw"] == found["ours"]["dw"]


def test_who_does_not_take_a_problem_is_left_out() -> None:
    problem = Problem.parse("8x16:bf16")
    found = errors(problem, {"ours": formula, "aten": aten}, CPU)  # ATen has it on CUDA only
    assert set(found) == {"ours"}
    assert row(problem, found, {"how": "tuned"})["ours over"] == {}


@pytest.mark.slow
@pytest.mark.parametrize("dw", ["weight", "fp32"])
def test_kernels_run_in_the_emulator(
    dw: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if find_compiler() is None:
        pytest.skip("needs a C++ compiler")
    out = tmp_path / "errors.json"
    options = ["--random", "1", "--elements", "20000", "--shapes", "300x64:fp32", "--emulator"]
    assert main(["--module", str(COMMITTED), *options, "--dw", dw, "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 6 and all(set(r["errors"]) == {"ours", "composite"} for r in rows)
    for each in rows:
        assert each["kernel"] and 0.3 < each["ours over"]["composite"]["dw"] < 1.2
        assert (each["errors"]["ours"]["dw"] < 1e-6) == (dw == "fp32" or ":fp32" in each["shape"])
    assert "fp32        dw / composite" in capsys.readouterr().out


def test_dw_may_be_asked_for_in_fp32() -> None:
    problem, module = Problem.parse("300x64:bf16"), load_module(COMMITTED)
    calls = {"ours": of_module(module, True), "rounded": of_module(module, False)}
    calls["composite"] = in_fp32(composite)
    found = errors(problem, calls, CPU)
    assert found["ours"]["dw"] < 1e-6 and found["composite"]["dw"] < 1e-6
    assert found["rounded"]["dw"] > 1e-3 and found["rounded"]["dx"] == found["ours"]["dx"]


def test_table_says_where_ours_is_worst() -> None:
    def found(dw: float) -> Any:
        return {"ours": {"dx": 1e-8, "dw": dw}, "aten": {"dx": 1e-8, "dw": 1e-7}}

    rows = [
        row(Problem.parse(shape), found(dw), {"how": "tuned", "kernel": "k"})
        for shape, dw in (("8x64:fp32", 0.9e-7), ("9x64:fp32", 1.3e-7))
    ]
    assert rows[1]["ours over"] == {"aten": {"dx": 1.0, "dw": 1.3}}
    assert worst(rows).splitlines() == [
        "fp32        dx / aten       at most 1.000 (9x64:fp32), above 1.1 at 0 of 2",
        "fp32        dw / aten       at most 1.300 (9x64:fp32), above 1.1 at 1 of 2",
    ]


def test_bad_input_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "errors.json")]
    assert main(["--module", str(tmp_path), *out]) == 2
    assert "is no emitted package" in capsys.readouterr().err
    assert not (tmp_path / "errors.json").exists()
