"""The comparison of LayerNorm's backward: everything in it that needs no GPU."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.compare import main
from benchmarks.comparison import Comparison, Plan, operation_of_package
from benchmarks.goals import goals
from benchmarks.harness import BLOCKS, Contender
from benchmarks.peers import choose_peers
from benchmarks.peers.peer import Gradients, arguments
from benchmarks.peers.pytorch import aten_layer_norm, decomposed_layer_norm
from benchmarks.prepare import any_inputs
from benchmarks.results import Results
from generator.errors import NormforgeError
from generator.operations import LAYERNORM_BACKWARD, OPERATIONS
from generator.operations.rmsnorm_backward import Inputs
from generator.problem import Problem
from generator.shape_lists import load_problems
from normforge.serve.reference import reference_backward
from tests.support.comparison import ENVIRONMENT, CpuTimer, row

NAME = LAYERNORM_BACKWARD.name
CPU = torch.device("cpu")
SHAPE = f"{NAME}:16x64:bf16"
EVERY = load_problems("compare")


def gradients(dy: Any, x: Any, mean: Any, rstd: Any, weight: Any) -> Gradients:
    dx, sums = reference_backward(dy, x, rstd, weight, mean=mean)[:2]
    return dx, *sums.view(2, -1)  # type: ignore[return-value]


def good(inputs: Inputs) -> Any:
    def run() -> Gradients:
        dy, x, mean, rstd, weight = arguments(inputs)
        return gradients(dy, x, mean, rstd, weight)

    return run


def swapped(inputs: Inputs) -> Any:
    return lambda: (lambda dx, dgamma, dbeta: (dx, dbeta, dgamma))(*good(inputs)())


def without_dbeta(inputs: Inputs) -> Any:
    return lambda: good(inputs)()[:2]


def mixed(inputs: Inputs) -> Any:
    return lambda: (*good(inputs)()[:2], good(inputs)()[2].float())


def restless(inputs: Inputs) -> Any:
    calls = iter(range(1000))

    def run() -> Gradients:
        dx, dgamma, dbeta = good(inputs)()
        dbeta[-1] += next(calls) % 2
        return dx, dgamma, dbeta

    return run


def comparison(contenders: dict[str, Contender], seen: list[torch.dtype]) -> Comparison:
    def backward(dy: Any, x: Any, mean: Any, rstd: Any, weight: Any) -> Any:
        seen.append(weight.dtype)
        return gradients(dy, x, mean, rstd, weight)

    module: Any = SimpleNamespace(
        layer_norm_backward=backward, explain=lambda *shape: {"how": "tuned"}
    )
    peers = tuple(SimpleNamespace(name=name, tuned=False) for name in contenders)
    plan = Plan((), frozenset(), peers, until=0.0, operation=NAME)  # type: ignore[arg-type]
    return Comparison(plan, contenders, module, CpuTimer())  # type: ignore[arg-type]


def test_both_sums_are_checked_and_their_bits_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    binds = (good, swapped, without_dbeta, mixed, restless)
    contenders = {bind.__name__: Contender(bind) for bind in binds}
    made = comparison(contenders, []).measure_shape(Problem.parse(SHAPE))
    peers = made["peers"]
    assert (made["ours_us"], peers["good"]["us"]) == (101.0, 102.0)
    assert 0 < peers["good"]["error_dw"] == made["ours_error_dw"] < 2**-8
    assert peers["swapped"]["error_dw"] > 0.1
    assert peers["without_dbeta"]["reason"] == "ValueError: dw is (64,) of torch.bfloat16"
    assert peers["mixed"]["reason"] == "ValueError: dw is (128,) of torch.float32"
    assert peers["good"]["deterministic"] is True
    assert peers["restless"]["deterministic"] is False
    json.dumps(made, allow_nan=False)


def test_an_fp32_weight_is_timed_beside_one_of_xs_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    seen: list[torch.dtype] = []
    made = comparison({}, seen).measure_shape(Problem.parse(f"{SHAPE}:fp32"))
    assert made["plain_weight_us"] == 102.0
    assert seen.count(torch.bfloat16) == BLOCKS


@pytest.mark.parametrize("shape", [SHAPE, f"{SHAPE}:fp32", f"{NAME}:33x48:fp32"])
def test_the_compiled_formula_is_the_backward(shape: str) -> None:
    inputs = LAYERNORM_BACKWARD.make_inputs(Problem.parse(shape), CPU)
    for out, expected in zip(
        decomposed_layer_norm(*arguments(inputs)), good(inputs)(), strict=True
    ):
        assert out.dtype == expected.dtype
        torch.testing.assert_close(out, expected, rtol=2**-7, atol=1e-4)


def test_aten_is_given_the_statistics_of_every_row() -> None:
    inputs = LAYERNORM_BACKWARD.make_inputs(Problem.parse(f"{NAME}:33x48:fp32"), CPU)
    for out, expected in zip(aten_layer_norm(inputs)(), good(inputs)(), strict=True):
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_inputs_for_compiling_are_those_of_the_operation() -> None:
    found = any_inputs(Problem.parse(f"{SHAPE}:fp32"), CPU)
    assert (found.mean.shape, found.mean.dtype) == ((16,), torch.float32)
    assert (found.x.dtype, found.weight.dtype) == (torch.bfloat16, torch.float32)
    assert not hasattr(any_inputs(Problem.parse("16x64:bf16"), CPU), "mean")


def test_goals_are_those_of_layernorm() -> None:
    def verdicts(ratio: float) -> list[tuple[str, str, bool | None]]:
        some = [row(problem, ratio) for problem in EVERY]
        return [(goal.text, goal.limit, goal.met) for goal in goals(some, NAME)]

    mean, faster = "all 47 shapes, geometric mean", "faster than the best peer, each"
    assert verdicts(1.07) == [(mean, "≤ 1.08 floor", True), (faster, "≥ 1.00", True)]
    assert [met for _, _, met in verdicts(1.09)] == [False, True]
    assert [met for _, _, met in verdicts(1.6)] == [False, False]


def test_page_and_resume_know_the_operation(tmp_path: Path) -> None:
    path = tmp_path / "layernorm.json"
    environment = {**ENVIRONMENT, "operation": NAME}
    some = [row(EVERY[0], peers={"aten": 2.0, "cudnn": 1.5})]
    Results(path, environment, some).write()
    assert main(["--render", "--out", str(path)]) == 0
    page = path.with_suffix(".md").read_text()
    assert page.startswith("# LayerNorm backward on NVIDIA H200\n")
    assert "| 4096x256:bf16 |" in page
    assert "≤ 1.08 floor" in page
    assert "≤ 1.12 floor" not in page
    assert "| cuDNN best plan |" in page

    results = Results.resume(path, environment)
    problems = tuple(load_problems("compare", NAME)[:2])
    peers = tuple(choose_peers("aten,cudnn", NAME))
    plan = Plan(problems, frozenset(), peers, until=0.0, operation=NAME)
    assert plan.remaining(results) == [problems[1]]
    results.put(row(EVERY[0], 2.0))
    results.sort(problems)
    assert len(results.rows) == 1


def test_paths_are_asked_with_inputs_of_the_operation(tmp_path: Path) -> None:
    made = row(EVERY[0])
    made["ours_path"] = None
    asked: list[Problem] = []
    found: Any = comparison({}, [])
    found.plan = SimpleNamespace(until=float("inf"))
    found._path = lambda name, problem: asked.append(problem) or "kernel"
    environment = {**ENVIRONMENT, "operation": NAME}
    found.record_paths(Results(tmp_path / "l.json", environment, [made]))
    assert [str(problem) for problem in asked] == [f"{NAME}:4096x256:bf16"]


def test_the_package_says_which_operation_it_is_of() -> None:
    folder = Path("generated/h200/rmsnorm_backward")
    assert operation_of_package(folder) == operation_of_package(folder, "rmsnorm_backward")
    assert operation_of_package(folder) in OPERATIONS
    with pytest.raises(NormforgeError, match="of rmsnorm_backward, not of layernorm_backward"):
        operation_of_package(folder, NAME)
    with pytest.raises(NormforgeError, match="cannot be read"):
        operation_of_package(Path("benchmarks"))
