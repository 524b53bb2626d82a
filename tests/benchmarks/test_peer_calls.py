"""A peer's timed call hands over the very tensors it was bound to, and runs no operator of PyTorch
beside those that its own library needs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import forward
from benchmarks.comparison import FUNCTIONS, Comparison, Plan
from benchmarks.harness import Contender, Entrant
from benchmarks.peers import PEERS, libraries, pytorch
from benchmarks.peers.cudnn_plans import CudnnGraph
from generator.operations import OPERATIONS
from generator.operations.rmsnorm_backward import Inputs
from generator.operations.rmsnorm_forward import EPS, make_inputs
from generator.problem import RMSNORM_BACKWARD, Problem
from tests.support.entry_points import aten_on_cpu
from tests.support.operators import operators_of

LAYERNORM = "layernorm_backward"
TIMER: Any = SimpleNamespace(device=torch.device("cpu"))


def inputs_of(operation: str = RMSNORM_BACKWARD) -> Inputs:
    problem = Problem.parse("6x16:bf16", operation)
    return OPERATIONS[operation].make_inputs(problem, torch.device("cpu"))  # type: ignore[no-any-return]


def mean_of(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """Return the argument that LayerNorm's calls have and RMSNorm's have not."""
    return (inputs.mean,) if hasattr(inputs, "mean") else ()


@contextmanager
def library(monkeypatch: pytest.MonkeyPatch, **modules: dict[str, Any]) -> Iterator[None]:
    """Modules that are not installed, by their names with __ for dots, and what is in them."""
    for name, content in modules.items():
        parts = name.split("__")
        for depth in range(1, len(parts) + 1):
            dotted = ".".join(parts[:depth])
            monkeypatch.setitem(sys.modules, dotted, ModuleType(dotted))
        for key, value in content.items():
            setattr(sys.modules[".".join(parts)], key, value)
    yield


class Recorder:
    """A function of a library: keeps its arguments and allocates nothing."""

    def __init__(self, *results: torch.Tensor) -> None:
        self.results, self.calls = results, []  # type: ignore[var-annotated]

    def __call__(self, *arguments: Any, **named: Any) -> tuple[torch.Tensor, ...]:
        self.calls.append((*arguments, *named.values()))
        return self.results


def same(given: Any, wanted: Any) -> None:
    """Assert that both have the same objects, in the same order."""
    assert [id(one) for one in given] == [id(one) for one in wanted]


def test_quack_gets_the_tensors_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    i, out = inputs_of(), [torch.empty(1) for _ in range(4)]
    backward, norm = Recorder(*out), Recorder(*out[:3])
    with library(monkeypatch, quack__rmsnorm={"rmsnorm_bwd": backward, "layernorm_bwd": norm}):
        call = libraries.quack(TIMER)(i)
        assert operators_of(lambda: same(call(), out[:2])) == []
        same(backward.calls[0], (i.x, i.weight, i.dy, i.rstd))
        i = inputs_of(LAYERNORM)
        assert operators_of(libraries.quack_layer_norm(TIMER)(i)) == []
        same(norm.calls[0], (i.x, i.weight, i.dy, i.rstd, i.mean))


def test_tuned_quack_allocates_what_its_library_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """dx, one row of partial sums for each CTA, their sum and its rounding."""
    tuner = Recorder()
    tuned = SimpleNamespace(fn=None, keys=(), configs=())
    modules: Any = {
        "quack__autotuner": {"Autotuner": lambda *_, **__: tuner},
        "quack__rmsnorm": {"rmsnorm_bwd_tuned": tuned},
        "quack__rmsnorm_config": {
            "get_sm_count": lambda N, device: 4,
            "prune_invalid_rmsnorm_bwd_configs": None,
        },
    }
    i = inputs_of()
    with library(monkeypatch, **modules):
        call = libraries.quack_tuned(TIMER)(i)
    assert operators_of(call) == ["empty_like", "empty", "sum", "_to_copy"]
    same(tuner.calls[0][:4], (i.x, i.weight, i.dy, i.rstd))


@pytest.mark.parametrize(
    ("load", "module", "in_place"),
    [
        (libraries.liger_triton, "liger_kernel__ops__rms_norm", True),
        (libraries.liger_cutedsl, "liger_kernel__ops__cutedsl__ops__rms_norm", False),
    ],
)
def test_ligers_call_is_its_backward_alone(
    monkeypatch: pytest.MonkeyPatch, load: Any, module: str, in_place: bool
) -> None:
    i, out = inputs_of(), [torch.empty(1) for _ in range(3)]
    function = SimpleNamespace(forward=Recorder(), backward=Recorder(*out))
    with library(monkeypatch, **{module: {"LigerRMSNormFunction": function}}):
        bind = load(TIMER)
    call = bind(i)
    (forward,) = function.forward.calls
    same(forward[1:3], (i.x, i.weight))
    assert forward[3:] == (libraries.EPS, 0.0, "llama", in_place)
    assert operators_of(lambda: same(call(), out[:2])) == []
    same(function.backward.calls[0], (forward[0], i.dy))
    assert len(function.forward.calls) == 1, "the forward is no part of the call"


def test_aten_gets_the_tensors_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    rms, layer, seen = inputs_of(), inputs_of(LAYERNORM), Recorder()
    operators = {"_fused_rms_norm_backward": seen, "native_layer_norm_backward": seen}
    monkeypatch.setattr(pytorch.torch, "ops", SimpleNamespace(aten=SimpleNamespace(**operators)))
    for bind, i, given in (
        (pytorch.aten, rms, (rms.dy, rms.x, rms.weight)),
        (pytorch.aten_layer_norm, layer, (layer.dy, layer.x, layer.weight, layer.weight)),
    ):
        assert operators_of(bind(i)) == []
        tensors = [each for each in seen.calls[-1] if torch.is_tensor(each)]
        same([each for each in tensors if each.dim() < 2 or each.shape[1] > 1], given)
        rows = [each.data_ptr() for each in tensors if each.dim() == 2 and each.shape[1] == 1]
        mean = mean_of(i)
        assert rows == [each.data_ptr() for each in (*mean, i.rstd)]
        assert seen.calls[-1][-1] == [True] * (2 + len(mean))


def test_aten_is_one_operator() -> None:
    call = pytorch.aten(inputs_of())
    ran: list[str] = []
    with aten_on_cpu(ran):
        call()
    assert ran == ["backward"]


def test_inductor_is_called_with_the_tensors_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    i, seen = inputs_of(), Recorder()
    monkeypatch.setattr(torch, "compile", lambda *_, **__: seen)
    call = pytorch.inductor(pytorch.decomposed_backward, "default", TIMER)(i)
    assert operators_of(call) == []
    same(seen.calls[0], (i.dy, i.x, i.rstd, i.weight))


@pytest.mark.parametrize("operation", PEERS)
def test_tuned_inductor_searches_as_long_as_it_can(
    monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """The options are those of torch.compile's mode. It compiles for each shape anew and keeps no
    choice of another process, which shared its GPU."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda _, **given: asked.append(given))
    for peer in PEERS[operation]:
        if peer.name in ("inductor", "inductor_max"):
            peer.load(TIMER)
    fresh = {"autotune_local_cache": False}
    most = {"max_autotune": True, "coordinate_descent_tuning": True}
    assert asked == [{"dynamic": False, "options": options} for options in (fresh, most | fresh)]


def test_cudnn_allocates_its_results_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    i, packs = inputs_of(), []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    graph: Any = object.__new__(CudnnGraph)
    graph.cudnn, graph.handle = SimpleNamespace(set_stream=lambda *_: None), None
    graph.graph = SimpleNamespace(
        get_workspace_size_plan_at_index=lambda plan: 64,
        execute_plan_at_index=lambda pack, *_: packs.append(pack),
    )
    graph._built, graph.given, graph.outputs = {0}, ["dy", "x", "w", "r"], ["dx", "dw"]
    graph.buffers = lambda inputs: [inputs.dy, inputs.x, inputs.weight, inputs.rstd]
    graph.like = lambda inputs: [inputs.x, inputs.weight]
    assert operators_of(graph.call(0, i)) == ["empty_like", "empty_like"]
    same([packs[0][name] for name in graph.given], (i.dy, i.x, i.weight, i.rstd))


def test_forwards_get_the_tensors_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is timed beside our forward has as much to do, and nothing more."""
    i = make_inputs(Problem.parse("6x16:bf16+residual"), torch.device("cpu"))
    given = (i.x, i.weight)
    seen = {name: Recorder() for name in ("ours", "liger", "quack", "aten", "inductor", "cudnn")}
    modules: Any = {
        "liger_kernel__ops__rms_norm": {"rms_norm_forward": seen["liger"]},
        "quack__rmsnorm": {"rmsnorm_fwd": seen["quack"]},
    }
    monkeypatch.setattr(torch.ops.aten, "_fused_rms_norm", seen["aten"])
    monkeypatch.setattr(torch, "compile", lambda *_, **__: seen["inductor"])
    monkeypatch.setattr(forward, "cudnn_forward", lambda *_: seen["cudnn"])
    with library(monkeypatch, **modules):
        makes = forward.contenders(seen["ours"], i, TIMER)  # type: ignore[arg-type]
        calls = {name: make() for name, make in makes.items()}
    assert [name for name, call in calls.items() if operators_of(call)] == []
    for recorder in (seen["ours"], seen["liger"], seen["quack"], seen["inductor"]):
        same(recorder.calls[0][:2], given)
    same((seen["aten"].calls[0][0], seen["aten"].calls[0][2]), given)
    assert seen["ours"].calls[0][2:] == (EPS,)
    assert seen["ours"].calls[1][2:4] == (EPS, 0.0) and seen["ours"].calls[1][4] is i.residual
    assert seen["quack"].calls[0][2:] == (EPS, True), "rstd is stored, as ours is"
    assert seen["cudnn"].calls == [()]


@pytest.mark.parametrize("operation", FUNCTIONS)
def test_ours_is_called_like_a_peer(operation: str) -> None:
    i, seen = inputs_of(operation), Recorder()
    module: Any = SimpleNamespace(**{FUNCTIONS[operation]: seen})
    plan = Plan((), frozenset(), (), 0.0, operation)
    ours = Comparison(plan, {}, module, TIMER).contenders["ours"]
    assert not ours.overwrites_dy
    assert operators_of(ours.bind(i)) == []
    same(seen.calls[0], (i.dy, i.x, *mean_of(i), i.rstd, i.weight))


@pytest.mark.parametrize("overwrites", [False, True])
def test_the_harness_adds_nothing_to_a_call(overwrites: bool) -> None:
    """One that writes over dy has its own, filled between blocks and not within a call."""
    i, bound = inputs_of(), []

    def bind(inputs: Inputs) -> Callable[[], tuple[torch.Tensor, ...]]:
        bound.append(inputs)
        return lambda: ()

    entrant = Entrant(Contender(bind, overwrites), i)
    (given,) = bound
    same((given.x, given.rstd, given.weight), (i.x, i.rstd, i.weight))
    assert (given.dy is i.dy) is not overwrites and torch.equal(given.dy, i.dy)
    assert operators_of(entrant.run) == []
    assert operators_of(entrant.restore) == (["copy_"] if overwrites else [])
