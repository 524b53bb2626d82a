"""benchmarks.neighbours: who takes part, what a row has of each, and the plain Triton kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import neighbours
from benchmarks.peers import neighbours as peers
from benchmarks.peers import plain
from generator.errors import NormforgeError
from generator.evaluate.verify.accuracy import compare_all
from generator.operations import OPERATIONS
from generator.operations.operation import TORCH_DTYPE
from generator.paths import GENERATED, REPOSITORY
from generator.problem import Problem
from normforge import operations as library
from tests.support.comparison import CpuTimer

CPU = torch.device("cpu")
H200 = GENERATED / "h200"
SHAPES = [
    "gated_rmsnorm_forward:70x128:bf16+offset",
    "gate_first_rmsnorm_sigmoid_backward:70x128:bf16",
    "rmsnorm_add_forward:9x768:fp16",
    "rmsnorm_rope_forward:64x64:bf16",
    "rmsnorm_rope_backward:64x64:fp32+rotary32+interleaved",
    "rmsnorm_rope_backward:9x128:bf16+joined32",
    "rope:64x64:bf16",
    "rmsnorm_fp8_forward:9x768:bf16",
    "rmsnorm_fp8_residual_forward:9x768:bf16",
    "rmsnorm_mxfp8_backward:9x96:bf16+residual_fp32",
    "rmsnorm_sum3_backward:9x768:bf16+residual",
    "layernorm_forward:9x768:bf16",
]


def inputs_of(problem: Problem) -> Any:
    return OPERATIONS[problem.operation].make_inputs(problem, CPU)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_formula_is_the_operation(shape: str) -> None:
    """Eager code, and what Inductor compiles, give all outputs with their dtypes."""
    problem = Problem.parse(shape)
    inputs, operation = inputs_of(problem), OPERATIONS[problem.operation]
    found = peers.formula(problem)(inputs)()
    bounds = operation.bounds(problem, inputs)
    assert found.keys() == bounds.keys()
    flat = {name: found[name].reshape(bound.reference.shape) for name, bound in bounds.items()}
    assert compare_all(flat, bounds).fault == ""
    dtypes = {spec.name: spec.dtype for spec in operation.outputs(problem)}
    assert {name: found[name].dtype for name in found} == {
        name: TORCH_DTYPE[dtype] for name, dtype in dtypes.items()
    }
    assert neighbours.checked(peers.formula(problem)(inputs), bounds)["same_bits"]


def test_a_formula_may_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda run, **how: asked.append(how) or run)
    problem = Problem.parse(SHAPES[0])
    for mode in ("default", "max-autotune-no-cudagraphs"):
        peers.formula(problem, mode)(inputs_of(problem))()
    assert asked == [
        {"dynamic": False, "mode": None},
        {"dynamic": False, "mode": "max-autotune-no-cudagraphs"},
    ]


def test_ours_is_the_package_s_kernel_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    class Server:
        def __init__(self, operation: Any, source: Any) -> None:
            assert operation is library.OPERATIONS["rmsnorm_rope_forward"]

        def by_kernel(self, tensors: dict[str, Any], offset: float) -> Any:
            given.append((tensors, offset))
            return "nothing like it was tuned" if len(given) > 1 else {"y": tensors["x"]}

    monkeypatch.setattr(peers, "RowServer", Server)
    problem = Problem.parse("rmsnorm_rope_forward:64x64:bf16+offset")
    inputs = inputs_of(problem)
    call = peers.ours(problem, H200)(inputs)
    assert call()["y"].shape == (2, 32, 64)
    tensors, offset = given[0]
    assert (tensors["cos"].shape, tensors["weight"].shape, offset) == ((2, 1, 32), (64,), 1.0)
    with pytest.raises(NormforgeError, match="nothing like it was tuned"):
        call()


def test_shapes_are_those_that_packages_were_tuned_for() -> None:
    found = neighbours.problems_of(H200, "all", "tuned")
    operations = {problem.operation for problem in found}
    assert {"gated_rmsnorm_forward", "rmsnorm_fp8_backward"} <= operations
    assert not operations & {*neighbours.OWN_BENCHMARKS}
    (only,) = {p.operation for p in neighbours.problems_of(H200, "rmsnorm_fp8_forward", "tuned")}
    assert only == "rmsnorm_fp8_forward"
    (named,) = neighbours.problems_of(H200, "rmsnorm_fp8_forward", "9x768:bf16")
    assert str(named) == "rmsnorm_fp8_forward:9x768:bf16"
    with pytest.raises(NormforgeError, match="--shapes is of one operation: name it with --ops"):
        neighbours.problems_of(H200, "all", "9x768:bf16")
    with pytest.raises(NormforgeError, match="has no package of nothing: tune it, or leave it out"):
        neighbours.problems_of(H200, "nothing", "tuned")


# ---- A row ---------------------------------------------------------------------------------------


def measured(monkeypatch: pytest.MonkeyPatch, peers: str = "all") -> dict[str, Any]:
    """Measure contenders that are right, off by a part, another thing, missing, and unsteady."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(neighbours, "host_time", lambda call: 7.0)
    problem = Problem.parse("rmsnorm_add_forward:8x64:fp32")
    turns, everyone = iter(range(100)), neighbours.contenders

    def contenders(problem: Problem, folder: Path, inputs: Any, timer: Any) -> dict[str, Any]:
        right = everyone(problem, folder, inputs, timer)["eager"]()
        exact = right(inputs)()

        def scaled(factor: float, wander: float = 0.0) -> Any:
            def call() -> dict[str, torch.Tensor]:
                by = factor + wander * next(turns)
                return exact | {"y": exact["y"] * by}

            return lambda: lambda inputs: call

        def missing() -> Any:
            raise ImportError("no wheel")

        return {
            "ours": lambda: right,
            "off": scaled(1.01),
            "other": scaled(1.5),
            "moody": scaled(1.0, 1e-4),
            "missing": missing,
        }

    monkeypatch.setattr(neighbours, "contenders", contenders)
    timer: Any = CpuTimer()
    return neighbours.measure(problem, H200, timer, peers)


def test_a_row_has_times_errors_and_bits_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    row = measured(monkeypatch)
    cells = row["cells"]
    assert cells["ours"]["errors"]["y"] < 1e-6 and cells["ours"]["same_bits"]
    assert cells["off"]["errors"]["y"] == pytest.approx(0.01, rel=1e-3)
    assert cells["other"] == {"reason": "ValueError: y is off by 0.5 of itself"}
    assert cells["missing"] == {"reason": "ImportError: no wheel"}
    assert cells["moody"]["same_bits"] is False and cells["off"]["same_bits"] is True
    # The floor takes 100 µs, and whoever is timed a microsecond more than the one before.
    timed = [name for name in cells if "us" in cells[name]]
    assert timed == ["ours", "off", "moody"] and row["floor_us"] == 100.0
    for us, name in enumerate(timed, start=101):
        assert (cells[name]["us"], cells[name]["ratio"]) == (us, us / 100)
        assert cells[name]["host_us"] == 7.0
    assert "other -" in neighbours.brief({"shape": "S", **row})


def test_some_peers_take_part_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(measured(monkeypatch, "off")["cells"]) == ["ours", "off"]


def test_means_are_of_the_shapes_of_an_operation_that_a_peer_serves() -> None:
    def row(shape: str, **ratios: float | None) -> dict[str, Any]:
        cells = {name: {"ratio": r} if r else {"reason": "no"} for name, r in ratios.items()}
        return {"shape": shape, "cells": cells}

    rows = [row("a:1", ours=1.0, triton=None), row("a:2", ours=4.0, triton=9.0), row("b:1", ours=3)]
    assert neighbours.summary(rows).splitlines() == [
        "a: ours 2.000 (2), triton 9.000 (1)",
        "b: ours 3.000 (1)",
    ]


# ---- The plain Triton kernels --------------------------------------------------------------------

IN_THE_INTERPRETER = """
import json, sys, torch
from benchmarks.peers import plain
from generator.evaluate.verify.accuracy import compare
from generator.operations import OPERATIONS
from generator.problem import Problem
found = {}
for shape in json.loads(sys.argv[1]):
    problem = Problem.parse(shape)
    operation = OPERATIONS[problem.operation]
    inputs = operation.make_inputs(problem, torch.device("cpu"))
    launch = next(plain.launches(problem.operation, problem.N))
    outputs = plain.bind(problem.operation, inputs, 2, launch)()
    bounds = operation.bounds(problem, inputs)
    assert outputs.keys() == bounds.keys(), shape
    for name, bound in bounds.items():
        if outputs[name].dtype != torch.float8_e4m3fn:  # the interpreter rounds them otherwise
            found[f"{shape} {name}"] = compare(
                name, outputs[name], bound.reference, bound.unit, bound.slack
            )[1]
print(json.dumps(found))
"""


def test_plain_kernels_compute_their_operations() -> None:
    pytest.importorskip("triton", reason="needs Triton (pip install triton)")
    options = {"rope": ("",), "rmsnorm_fp8_backward": ("+offset", "+residual")}
    shapes = [
        f"{name}:70x{128 if 'rope' in name or 'gated' in name else 768}:fp32{option}"
        for name in plain.NAMES
        for option in options.get(name, ("+offset",))
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", IN_THE_INTERPRETER, json.dumps(shapes)]
    done = subprocess.run(
        command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) >= 2 * len(plain.NAMES) - 1
    assert {name: fault for name, fault in found.items() if fault} == {}


def test_several_launches_of_each_are_tried() -> None:
    for name in plain.NAMES:
        for N in (128, 4096):
            found = list(plain.launches(name, N))
            assert len(found) >= 3 and len({tuple(one.items()) for one in found}) == len(found)
            assert all((one["per_sm"] > 0) == name.endswith("backward") for one in found)
            assert all(one["B"] == 1 for one in found) == (N > plain.HEAD_COLUMNS)


REFUSED = {
    "rmsnorm_sum2_backward:9x768:bf16": "there is no plain kernel of rmsnorm_sum2_backward",
    "rmsnorm_rope_forward:64x64:bf16+interleaved": "rotates halves",
    "rmsnorm_rope_forward:64x64:bf16+rotary32": "rotates all columns",
    "rmsnorm_fp8_backward:9x768:bf16+residual_fp32": "adds residuals of x's dtype",
}


@pytest.mark.parametrize("shape", REFUSED)
def test_what_plain_kernels_do_not_do_is_said(shape: str) -> None:
    problem = Problem.parse(shape)
    launch = {"B": 1, "num_warps": 4, "per_sm": 0}
    with pytest.raises(NormforgeError, match=REFUSED[shape]):
        plain.bind(problem.operation, inputs_of(problem), 2, launch)


def test_the_fastest_launch_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of three raises, as one does that needs too many registers."""
    times = {4: 5.0, 8: 9.0}

    def bind(name: str, inputs: Any, sms: int, launch: plain.Launch) -> Any:
        def call() -> Any:
            if launch["num_warps"] == 16:
                raise RuntimeError("out of registers")
            return launch["num_warps"]

        return call

    class Timer:
        device = CPU

        def block(self, operations: list[Any], rounds: int) -> list[list[float]]:
            return [[times[operations[0]()]] * rounds]

    monkeypatch.setattr(plain, "bind", bind)
    properties = SimpleNamespace(multi_processor_count=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    timer: Any = Timer()
    problem = Problem.parse("rmsnorm_add_forward:9x768:bf16")
    assert peers.triton(problem, None, timer)(None)() == 4
    times.clear()
    with pytest.raises(RuntimeError, match="out of registers"):
        peers.triton(problem, None, timer)


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[2]])
def test_flash_linear_attention_serves_one_kind_of_gate(shape: str) -> None:
    with pytest.raises(NormforgeError, match="a gate of SiLU behind them"):
        peers.flash_linear_attention(Problem.parse(shape))
