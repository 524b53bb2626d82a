"""cuDNN as a peer, with a frontend that only keeps books: what it is told, and which plan runs."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.peers import cudnn_plans
from benchmarks.peers.cudnn_plans import (
    cudnn_best,
    cudnn_forward,
    cudnn_heuristic,
    cudnn_version,
)
from generator.operations import OPERATIONS, rmsnorm_forward
from generator.problem import Problem

CPU = torch.device("cpu")


class FakeTensor:
    def __init__(self, **said: Any) -> None:
        self.said = said

    def set_output(self, value: bool) -> FakeTensor:
        self.said["output"] = value
        return self

    def set_data_type(self, value: str) -> FakeTensor:
        self.said["data_type"] = value
        return self


class FakeGraph:
    """Plan 0 cannot be built, plan 1 fails when it runs, the others write their number."""

    plans = 4
    made: list[FakeGraph] = []  # noqa: RUF012

    def __init__(self, **said: Any) -> None:
        self.said, self.built, self.ran = said, [], []
        FakeGraph.made.append(self)

    def tensor(self, **said: Any) -> FakeTensor:
        return FakeTensor(**said)

    def _operation(self, outputs: int, given: dict[str, Any]) -> list[FakeTensor | None]:
        self.given = given
        self.outputs = [FakeTensor() for _ in range(outputs)]
        return [*self.outputs, *[None] * (3 - outputs)]

    def rmsnorm_backward(self, *, has_dbias: bool, **given: Any) -> list[FakeTensor | None]:
        assert not has_dbias
        return self._operation(2, given)

    def layernorm_backward(self, **given: Any) -> list[FakeTensor | None]:
        return self._operation(3, given)

    def rmsnorm(self, *, norm_forward_phase: str, **given: Any) -> list[FakeTensor | None]:
        assert norm_forward_phase == "TRAINING"
        return self._operation(2, given)[:2]

    def validate(self) -> None:
        assert all(output.said["output"] for output in self.outputs)

    def build_operation_graph(self) -> None:
        pass

    def create_execution_plans(self, modes: list[str]) -> None:
        assert modes == ["A", "B", "FALLBACK"]

    def get_execution_plan_count(self) -> int:
        return self.plans

    def build_plan_at_index(self, index: int) -> None:
        if index == 0:
            raise RuntimeError("not supported")
        self.built.append(index)

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        return 0

    def execute_plan_at_index(self, pack: Any, workspace: Any, index: int, handle: Any) -> None:
        assert set(pack) == {*self.given.values(), *self.outputs}
        assert (workspace.dtype, handle.stream) == (torch.uint8, 77)
        if index == 1:
            raise RuntimeError("launch failed")
        self.ran.append(index)
        self.packed = pack
        for output in self.outputs:
            pack[output].fill_(index)


class SlowestFirst:
    """A timer by which the last plan is the fastest. asked: for how many bytes it told how many
    sets there shall be; seen: how many calls each operation had."""

    def __init__(self, sets: int = 1) -> None:
        self._sets, self.asked, self.seen = sets, [], []  # type: ignore[var-annotated]

    def sets(self, set_bytes: int) -> int:
        self.asked.append(set_bytes)
        return self._sets

    def block(self, operations: list[Any], rounds: int) -> list[list[float]]:
        self.seen += [len(calls) for calls in operations]
        return [[100.0 / float(calls[-1]()[0][0, 0])] * rounds for calls in operations]


@pytest.fixture(autouse=True)
def frontend(monkeypatch: pytest.MonkeyPatch) -> None:
    def set_stream(handle: Any, stream: int) -> None:
        handle.stream = stream

    fake = SimpleNamespace(
        pygraph=FakeGraph,
        create_handle=SimpleNamespace,
        set_stream=set_stream,
        data_type=SimpleNamespace(BFLOAT16="bf16", HALF="fp16", FLOAT="fp32"),
        norm_forward_phase=SimpleNamespace(TRAINING="TRAINING"),
        heur_mode=SimpleNamespace(A="A", B="B", FALLBACK="FALLBACK"),
        backend_version_string=lambda: "9.19.0",
    )
    monkeypatch.setitem(sys.modules, "cudnn", fake)
    stream = SimpleNamespace(cuda_stream=77)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(FakeGraph, "made", [])


def inputs_of(shape: str) -> Any:
    problem = Problem.parse(shape)
    return OPERATIONS[problem.operation].make_inputs(problem, CPU)


@pytest.mark.parametrize(
    ("shape", "names", "sums"),
    [
        ("16x64:bf16:fp32", ["grad", "input", "scale", "inv_variance"], 1),
        (
            "layernorm_backward:16x64:bf16:fp32",
            ["grad", "input", "scale", "inv_variance", "mean"],
            2,
        ),
    ],
)
def test_the_fastest_plan_runs_on_all_inputs_of_a_shape(
    shape: str, names: list[str], sums: int
) -> None:
    bind, inputs = cudnn_best(SlowestFirst()), inputs_of(shape)  # type: ignore[arg-type]
    dx, *rest = bind(inputs)()
    assert (dx.shape, dx.dtype, float(dx[0, 0])) == ((16, 64), torch.bfloat16, 3.0)
    assert [(dw.shape, dw.dtype) for dw in rest] == [((64,), torch.float32)] * sums
    (graph,) = FakeGraph.made
    assert graph.ran == [2, 3, 2, 3, 3]
    assert graph.said["io_data_type"] == "bf16"
    assert list(graph.given) == names
    for name, rows, columns, dtype in [
        ("grad", 16, 64, "bf16"),
        ("input", 16, 64, "bf16"),
        ("scale", 1, 64, "fp32"),
        ("inv_variance", 16, 1, "fp32"),
    ]:
        strides = [columns, 1, columns, columns]
        said = {"dim": [rows, columns, 1, 1], "stride": strides, "data_type": dtype}
        assert graph.given[name].said == said
    assert [output.said["data_type"] for output in graph.outputs] == ["bf16", *["fp32"] * sums]

    other = inputs_of(shape)
    assert float(bind(other)()[0][0, 0]) == 3.0
    assert len(FakeGraph.made) == 1
    assert graph.built == [1, 2, 3]
    assert graph.packed[graph.given["input"]] is other.x
    assert graph.packed[graph.given["grad"]] is other.dy


def test_plans_are_chosen_under_the_condition_of_the_timer() -> None:
    """x, dy and dx have 16 x 64 elements of two bytes, rstd 16 of four, the weight and dw 64 of
    two."""
    timer, inputs = SlowestFirst(sets=3), inputs_of("16x64:bf16")
    bind = cudnn_best(timer)  # type: ignore[arg-type]
    assert float(bind(inputs)()[0][0, 0]) == 3.0
    assert timer.asked == [3 * 16 * 64 * 2 + 16 * 4 + 2 * 64 * 2]
    assert timer.seen == [3, 3], "a call for each set, of the two plans that run"
    (graph,) = FakeGraph.made
    assert graph.packed[graph.given["input"]] is inputs.x, "and then its own"


def test_the_forward_runs_by_its_fastest_plan() -> None:
    inputs = rmsnorm_forward.make_inputs(Problem.parse("16x64:bf16"), CPU)
    y, rstd = cudnn_forward(inputs, SlowestFirst())()  # type: ignore[arg-type]
    assert (y.shape, y.dtype, float(y[0, 0])) == ((16, 64), torch.bfloat16, 3.0)
    assert (rstd.shape, rstd.dtype) == ((16, 1), torch.float32)
    (graph,) = FakeGraph.made
    assert list(graph.given) == ["input", "scale", "epsilon"]
    assert graph.given["epsilon"].said["is_pass_by_value"]
    assert graph.packed[graph.given["input"]] is inputs.x
    assert graph.packed[graph.given["epsilon"]].flatten().tolist() == [
        pytest.approx(rmsnorm_forward.EPS)
    ]


def test_no_plan_is_built_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_plans, "PLAN_SECONDS", -1.0)
    bind = cudnn_best(SlowestFirst())  # type: ignore[arg-type]
    assert float(bind(inputs_of("16x64:bf16"))()[0][0, 0]) == 2.0
    assert FakeGraph.made[0].built == [1, 2]


def test_the_first_plan_is_the_first_that_can_be_built() -> None:
    bind = cudnn_heuristic(SlowestFirst())  # type: ignore[arg-type]
    call = bind(inputs_of("16x64:fp16"))
    assert set(FakeGraph.made[0].built) == {1}
    with pytest.raises(RuntimeError, match="launch failed"):
        call()


def test_a_shape_that_no_plan_serves_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakeGraph, "plans", 2)
    bind = cudnn_best(SlowestFirst())  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="none of cuDNN's 2 plans runs: not supported"):
        bind(inputs_of("16x64:fp16"))


def test_the_version_is_that_of_the_library() -> None:
    assert cudnn_version() == "cuDNN 9.19.0"
