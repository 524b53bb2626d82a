"""benchmarks.harness: what is checked and timed of every contender, and what a failure leaves."""

from __future__ import annotations

import json
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import harness
from benchmarks.comparison import Comparison, Plan, make_row
from benchmarks.harness import BLOCKS, Cell, Contender, Entrant, ShapeRun, repeats
from benchmarks.peers import choose_peers
from generator.errors import NormforgeError
from generator.evaluate.verify.determinism import RUNS
from generator.operations import OPERATIONS
from generator.operations.rmsnorm_backward import Inputs, make_inputs
from generator.problem import Problem
from normforge.serve.reference import reference_backward
from tests.support.comparison import CpuTimer


def good(inputs: Inputs) -> Any:
    return lambda: reference_backward(inputs.dy, inputs.x, inputs.rstd, inputs.weight)


def in_place(inputs: Inputs) -> Any:
    def run() -> tuple[torch.Tensor, torch.Tensor]:
        dx, dw = good(inputs)()
        return inputs.dy.copy_(dx), dw

    return run


def restless(inputs: Inputs) -> Any:
    calls = iter(range(1000))

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        dx, dw = good(inputs)()
        dw[0] += next(calls) % 2
        return dx, dw

    return run


def refuses(inputs: Inputs) -> Any:
    raise RuntimeError("N is\ntoo wide")


def narrow(inputs: Inputs) -> Any:
    def run() -> tuple[torch.Tensor, torch.Tensor]:
        dx, dw = good(inputs)()
        return dx, dw.double()

    return run


def not_a_number(inputs: Inputs) -> Any:
    def run() -> tuple[torch.Tensor, torch.Tensor]:
        dx, dw = good(inputs)()
        return dx * float("nan"), dw

    return run


def test_an_overwritten_dy_is_restored_before_each_run_and_each_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = Problem.parse("16x64:bf16")
    inputs = make_inputs(problem, torch.device("cpu"))
    assert repeats(Entrant(Contender(in_place, overwrites_dy=True), inputs))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    bound, fresh = [], []

    def bind(inputs: Inputs) -> Any:
        bound.append((inputs.dy, inputs.dy.clone()))
        return in_place(inputs)

    class Watching(CpuTimer):
        def block(self, operations: list[Any], rounds: int) -> list[list[float]]:
            if len(operations) > 1:  # beside the floor
                fresh.append(all(torch.equal(own, given) for own, given in bound))
            return super().block(operations, rounds)

    run = ShapeRun(problem, {"in_place": Contender(bind, overwrites_dy=True)}, Watching())  # type: ignore[arg-type]
    run.run()
    assert fresh == [True] * BLOCKS


@pytest.mark.parametrize("output", ["dx", "dw"])
@pytest.mark.parametrize("other", [0, 1, RUNS - 1])
@pytest.mark.parametrize("reuses", [False, True])
def test_one_bit_in_one_run_is_seen(output: str, other: int, reuses: bool) -> None:
    """Also of one that writes into the same tensors in every call."""
    inputs = make_inputs(Problem.parse("16x64:bf16"), torch.device("cpu"))
    made, kept, calls = good(inputs)(), good(inputs)(), count()

    def run() -> tuple[torch.Tensor, ...]:
        outputs = kept if reuses else tuple(out.clone() for out in made)
        for out, right in zip(outputs, made, strict=True):
            out.copy_(right)
        if next(calls) == other:
            outputs[output == "dw"].view(torch.int16).view(-1)[-1] ^= 1
        return outputs

    assert not repeats(Entrant(Contender(lambda inputs: run), inputs))
    assert repeats(Entrant(Contender(lambda inputs: run), inputs)), "later ones are all the same"


@pytest.mark.parametrize(
    ("operation", "place", "error"),
    [
        # 2^-3 of the whole output.
        ("rmsnorm_backward", 0, {"dx": 0.125, "dw": 0.0}),
        ("rmsnorm_backward", 1, {"dx": 0.0, "dw": 0.125}),
        # Of LayerNorm's two sums, which are judged as one, the second one alone.
        ("layernorm_backward", 2, {"dx": 0.0, "dw": None}),
    ],
)
def test_an_error_is_that_of_its_output(
    monkeypatch: pytest.MonkeyPatch, operation: str, place: int, error: dict[str, float | None]
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    problem = Problem.parse("16x64:fp32", operation)
    share = []

    def off(inputs: Inputs) -> Any:
        exact = OPERATIONS[operation].bounds(problem, inputs)
        dx, dw = (exact[name].reference.float() for name in ("dx", "dw"))
        outputs = [dx, *dw.split(problem.N)]
        share.append(float(outputs[-1].norm() / dw.norm()))
        outputs[place] = outputs[place] * 1.125
        return lambda: tuple(outputs)

    run = ShapeRun(problem, {"off": Contender(off)}, CpuTimer())  # type: ignore[arg-type]
    run.run()
    wanted = {name: 0.125 * share[0] if of is None else of for name, of in error.items()}
    found = {"dx": run.cells["off"].error_dx, "dw": run.cells["off"].error_dw}
    assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def test_a_contender_that_fails_gets_its_reason_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    problem = Problem.parse("16x64:bf16")
    contenders = {
        "ours": Contender(good),
        "in_place": Contender(in_place, overwrites_dy=True),
        "restless": Contender(restless),
        "refuses": Contender(refuses),
        "narrow": Contender(narrow),
        "not_a_number": Contender(not_a_number),
    }
    run = ShapeRun(problem, contenders, CpuTimer())  # type: ignore[arg-type]
    assert run.run() == 100.0
    cells = run.cells
    assert [cells[name].us for name in ("ours", "in_place", "restless")] == [101.0, 102.0, 103.0]
    assert cells["ours"].deterministic
    assert cells["in_place"].deterministic
    assert cells["restless"].deterministic is False
    assert cells["in_place"].error_dx == cells["ours"].error_dx
    assert cells["in_place"].error_dx is not None
    assert 0 < cells["in_place"].error_dx < 2**-8
    assert cells["refuses"] == Cell(reason="RuntimeError: N is too wide")
    assert cells["narrow"].reason == "ValueError: dw is (64,) of torch.float64"
    assert cells["not_a_number"].reason == "ValueError: dx is not finite"
    assert cells["narrow"].us is None

    made = make_row(problem, 100.0, cells, {"how": "tuned", "strategy": "atomic"})
    assert (made["ours_us"], made["strategy"]) == (101.0, "atomic")
    assert set(made["peers"]) == set(contenders) - {"ours"}
    json.dumps(made, allow_nan=False)


def test_an_fp32_weight_is_timed_in_the_same_blocks_as_one_of_xs_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    seen = []

    def backward(dy: Any, x: Any, rstd: Any, weight: Any) -> Any:
        seen.append(weight.dtype)
        return reference_backward(dy, x, rstd, weight)

    module: Any = SimpleNamespace(
        rmsnorm_backward=backward, explain=lambda *shape: {"how": "tuned"}
    )
    plan = Plan((), frozenset(), tuple(choose_peers("quack")), until=0.0)
    timer: Any = CpuTimer()
    comparison = Comparison(plan, {"quack": Contender(good)}, module, timer)
    made = comparison.measure_shape(Problem.parse("16x64:bf16:fp32"))
    assert (made["ours_us"], made["peers"]["quack"]["us"]) == (101.0, 102.0)
    assert made["plain_weight_us"] == 103.0
    assert seen.count(torch.bfloat16) == BLOCKS
    seen.clear()
    assert comparison.measure_shape(Problem.parse("16x64:bf16"))["plain_weight_us"] is None
    assert set(seen) == {torch.bfloat16}


def test_what_cannot_be_captured_is_timed_by_events_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(harness, "event_time", lambda entrant, timer: 55.0)
    problem = Problem.parse("16x64:bf16")

    uncapturable = []

    class Capturing(CpuTimer):
        def block(self, operations: list[Any], rounds: int) -> list[list[float]]:
            if any(call in uncapturable for calls in operations for call in calls):
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().block(operations, rounds)

    def late(inputs: Inputs) -> Any:
        uncapturable.append(good(inputs))
        return uncapturable[-1]

    run = ShapeRun(
        problem,
        {"ours": Contender(good), "late": Contender(late)},
        Capturing(),  # type: ignore[arg-type]
    )
    run.run()
    assert (run.cells["ours"].us, run.cells["ours"].timed) == (101.0, "graph")
    assert (run.cells["late"].us, run.cells["late"].timed) == (55.0, "events")


def test_a_lost_gpu_ends_the_run_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    run = ShapeRun(
        Problem.parse("16x64:bf16"),
        {"quack": Contender(good)},
        CpuTimer(),  # type: ignore[arg-type]
    )
    with pytest.raises(NormforgeError, match="quack on 16x64:bf16 left the GPU unusable"):
        run.run()
