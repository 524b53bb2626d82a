"""The checks of a kernel, on a "kernel" that computes in PyTorch and makes one planted mistake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from generator.evaluate.gpu import session as session_module
from generator.evaluate.gpu.evaluator import MeasuredEvaluator
from generator.evaluate.gpu.noise import collect, noise_in
from generator.evaluate.gpu.protocol import Candidate, Job
from generator.evaluate.gpu.rotation import FLUSH, ROTATION
from generator.evaluate.gpu.session import Session
from generator.evaluate.verify import accuracy, determinism
from generator.evaluate.verify.accuracy import check_accuracy, compare
from generator.evaluate.verify.bench import Bench
from generator.evaluate.verify.determinism import check_call_options, check_repeats, digest
from generator.evaluate.verify.guarded import Guarded
from generator.operations import RMSNORM_BACKWARD
from generator.operations.operation import HALF_UNIT, TORCH_DTYPE
from generator.operations.rmsnorm_backward import Inputs
from generator.operations.rows import inputs_class
from generator.problem import Problem
from generator.result import Result
from normforge.launch.kernel_arguments import DW_ADDED, DW_IN_WEIGHT_DTYPE
from normforge.operations import RowOperation, Signature, signature_of
from normforge.operations.formula import evaluate
from normforge.operations.tensor import row, rows, rows_out
from normforge.serve.reference import reference_backward
from tests.support.fake_driver import SPEC

CPU = torch.device("cpu")
PROBLEM = Problem.parse("24x40:bf16")
INPUTS = RMSNORM_BACKWARD.make_inputs(PROBLEM, CPU)
CANCELLING = RMSNORM_BACKWARD.make_cancelling(PROBLEM, INPUTS)
SIGNATURE = signature_of(PROBLEM.operation)
Mistake = Callable[[dict[str, Any]], None]


class Formula:
    """A runner. mistake: is shown every call, with its outputs when they are written."""

    workspace_bytes, clean_bytes = 256, 128

    def __init__(self, mistake: Mistake) -> None:
        self.mistake = mistake

    def run(
        self,
        inputs: Inputs,
        outputs: dict[str, torch.Tensor | None],
        workspace: torch.Tensor,
        *,
        dw_mode: int = DW_IN_WEIGHT_DTYPE,
    ) -> None:
        N = inputs.x.shape[-1]
        x, dy = (tensor.reshape(-1, N) for tensor in (inputs.x, inputs.dy))
        weight = torch.ones(N, dtype=x.dtype) if inputs.weight is None else inputs.weight
        dx, dw = reference_backward(dy, x, inputs.rstd, weight, dw_dtype=torch.float32)
        places = {"dx": outputs["dx"], "dw": outputs["dw"]}
        before = {name: None if out is None else out.clone() for name, out in places.items()}
        if places["dx"] is not None:
            places["dx"].copy_(dx)
        if places["dw"] is not None:
            assert dw is not None
            places["dw"].copy_(places["dw"] + dw if dw_mode == DW_ADDED else dw)
        self.mistake({**places, "mode": dw_mode, "packed": inputs.x.dim() == 3, "in": inputs,
                      "workspace": workspace, "before": before})  # fmt: skip


def bench(mistake: Mistake = lambda call: None) -> Bench:
    outputs = {
        out.name: Guarded(out.shape, TORCH_DTYPE[out.dtype], CPU)
        for out in RMSNORM_BACKWARD.outputs(PROBLEM)
    }
    return Bench(Formula(mistake), outputs, CPU)


def bump(tensor: torch.Tensor | None) -> None:
    assert tensor is not None
    tensor.view(-1)[3] += 1


OF_OPTIONS: dict[str, tuple[Callable[[dict[str, Any]], bool], str, str]] = {
    "without dw": (lambda c: c["dw"] is None, "dx", "dx of a call without dw"),
    "without dx": (lambda c: c["dx"] is None, "dw", "dw of a call without dx"),
    "fp32": (lambda c: c["mode"] == 1, "dw", "dw as fp32 does not round to dw"),
    "added": (lambda c: c["mode"] == 2, "dw", "dw added to a buffer is not"),
    "no weight": (lambda c: c["in"].weight is None, "dw", "a call without weight"),
    "packed": (lambda c: c["packed"], "dx", "packed heads"),
}
"""Calls with an option, an output that they have, and what is said where it is wrong."""


def wrong(name: str, call: dict[str, Any]) -> None:
    asked, output, _ = OF_OPTIONS[name]
    if asked(call):
        bump(call[output])


def unwritten(name: str, call: dict[str, Any]) -> None:
    asked, output, _ = OF_OPTIONS[name]
    if asked(call):
        call[output].copy_(call["before"][output])


MISTAKES: dict[str, tuple[Mistake, str]] = {
    f"{mistake.__name__}, {name}": (partial(mistake, name), said)
    for name, (*_, said) in OF_OPTIONS.items()
    for mistake in (wrong, unwritten)
}


def test_call_options_of_a_right_kernel_pass() -> None:
    assert check_call_options(bench(), INPUTS, SIGNATURE) == ""


def test_packed_rows_are_not_asked_of_a_kernel_that_does_not_take_them() -> None:
    mistake, _ = MISTAKES["wrong, packed"]
    assert check_call_options(bench(mistake), INPUTS, SIGNATURE, packs=False) == ""
    for N, packs in ((1024, True), (1023, False)):
        assert Candidate(b"", replace(SPEC, N=N)).packs is packs


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_one_call_option_is_found_and_named(name: str) -> None:
    mistake, said = MISTAKES[name]
    assert said in check_call_options(bench(mistake), INPUTS, SIGNATURE)


def add_chunks(call: dict[str, Any], left_out: int = 0) -> None:
    """Adds the sums of every eight rows one after another, as batch-invariant kernels do. left_out:
    rows that are forgotten in a call that adds."""
    if call["dw"] is None:
        return
    adds, given = call["mode"] == DW_ADDED, call["in"]
    x, dy = (tensor.reshape(24, -1).float() for tensor in (given.x, given.dy))
    products = (x * dy * given.rstd[:, None])[left_out if adds else 0 :]
    dw = call["before"]["dw"] if adds else torch.zeros(40)
    for chunk in products.split(8):
        dw = dw + chunk.sum(0)
    call["dw"].copy_(dw)


@pytest.mark.parametrize(
    ("batch_invariant", "left_out", "said"),
    [
        (True, 0, ""),
        (True, 8, "dw added to a buffer is not the buffer and dw"),
        (False, 0, "dw added to a buffer is not the buffer and dw"),
    ],
)
def test_sums_are_added_chunk_by_chunk_where_that_is_promised(
    monkeypatch: pytest.MonkeyPatch, batch_invariant: bool, left_out: int, said: str
) -> None:
    monkeypatch.setattr(determinism, "CHUNK_ROWS", 8)
    made = bench(partial(add_chunks, left_out=left_out))
    assert check_call_options(made, INPUTS, SIGNATURE, batch_invariant) == said


def found_by(
    session: Session,
    kind: str,
    mistake: Mistake = lambda call: None,
    around: Callable[[int], None] = lambda i: None,
    *,
    best_us: float | None = None,
    nondeterministic: bool = False,
) -> Result:
    """The result of a session's job of this kind, for a kernel that takes 3 us. around: what
    disturbs runs in the finals."""
    session.disturbance = around  # type: ignore[assignment]
    session.timer = cast(Any, SimpleNamespace(block=lambda *_: [[2.0] * 15, [3.0] * 15]))
    workload: Any = SimpleNamespace(
        operation=RMSNORM_BACKWARD,
        **{"inputs": INPUTS, "cancelling": CANCELLING, "bench": lambda c: bench(mistake)},
        expected=RMSNORM_BACKWARD.bounds(PROBLEM, INPUTS),
        **{"floor_bytes": 1, "number_of_sets": lambda _: 1, "operations": lambda *_: []},
    )
    kind_of = {"nondeterministic": nondeterministic, "batch_invariant": False, "packs": True}
    candidate = SimpleNamespace(**kind_of)
    job: Any = SimpleNamespace(candidates=[candidate], best_us=best_us, floor_us=None)
    result = getattr(session, f"_{kind}")(workload, job).result
    assert isinstance(result, Result)
    return result


@pytest.fixture
def session() -> Session:
    return object.__new__(Session)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_one_call_option_is_wrong_and_not_nondeterministic(
    session: Session, name: str
) -> None:
    result = found_by(session, "determinism", MISTAKES[name][0])
    assert (result.outcome, result.determinism) == ("wrong", "unverified")
    assert MISTAKES[name][1] in result.note


@pytest.mark.parametrize(
    ("kind", "on"),
    [("evaluate", CANCELLING), ("determinism", CANCELLING), ("determinism", INPUTS)],
    ids=["trial", "finals", "finals on ordinary inputs"],
)
def test_a_last_bit_that_changes_from_run_to_run_is_seen(
    session: Session, kind: str, on: Inputs
) -> None:
    """It is no error, and where sums do not cancel, other orders of additions may not show."""
    runs = count()

    def restless(call: dict[str, Any]) -> None:
        if call["in"].dy is on.dy and next(runs) % 2:
            call["dx"].view(torch.int16)[0, 0] ^= 1

    result = found_by(session, kind, restless)
    assert (result.outcome, result.determinism) == ("nondeterministic", "refuted")
    assert found_by(session, kind).determinism == "verified"


@pytest.mark.parametrize("kind", ["evaluate", "determinism"])
def test_luck_makes_no_kernel_deterministic(session: Session, kind: str) -> None:
    result = found_by(session, kind, nondeterministic=True)
    assert (result.outcome, result.determinism) == ("nondeterministic", "unverified")


@pytest.mark.parametrize(("best_us", "outcome"), [(1.9, "ok"), (1.85, "slow"), (None, "ok")])
def test_a_trial_far_behind_the_best_is_not_checked_further(
    session: Session, best_us: float | None, outcome: str
) -> None:
    """It takes 3 us: 1.58 times 1.9, and 1.62 times 1.85."""
    result = found_by(session, "evaluate", best_us=best_us)
    assert (result.outcome, result.us) == (outcome, 3.0)
    assert (result.determinism == "verified") is (outcome == "ok")


@pytest.mark.parametrize("dtype", HALF_UNIT)
def test_rounding_once_may_be_off_by_half_a_unit(dtype: str) -> None:
    assert HALF_UNIT[dtype] == torch.finfo(TORCH_DTYPE[dtype]).eps / 2


def test_finals_disturb_runs_on_cancelling_inputs(session: Session) -> None:
    disturbed: list[int] = []

    def shaken(call: dict[str, Any]) -> None:
        if disturbed and call["in"].dy is CANCELLING.dy:
            call["dx"].view(torch.int16)[0, 0] ^= disturbed[-1] % 2

    result = found_by(session, "determinism", shaken, disturbed.append)
    assert (result.outcome, result.determinism) == ("nondeterministic", "refuted")


@pytest.mark.parametrize(("sets", "condition"), [(1, FLUSH), (2, ROTATION)])
def test_a_block_of_few_inputs_says_that_they_were_flushed(
    session: Session, sets: int, condition: str
) -> None:
    asked: list[tuple[int, int]] = []
    block = [[1.0], [2.0]]
    timer = SimpleNamespace(condition=ROTATION, block=lambda own, rounds: (own, rounds, block)[2])
    session._timers = cast(Any, {ROTATION: timer})
    workload: Any = SimpleNamespace(
        bench=lambda candidate: candidate,
        number_of_sets=lambda timer: sets,
        operations=lambda benches, number: asked.append((len(benches), number)),
    )
    job = Job("interleave", PROBLEM, (Candidate(b"", SPEC),) * 3, condition=ROTATION)
    answer = session._interleave(workload, job)
    assert (answer.block, answer.condition) == (block, condition)
    assert asked == [(3, sets)]


def test_a_recheck_tells_bits_and_errors_of_the_same_kernel(session: Session) -> None:
    """The bits are those that the finals record."""

    def outcomes(mistake: Mistake) -> list[Result]:
        return [found_by(session, kind, mistake) for kind in ("determinism", "recheck")]

    finals, again = outcomes(lambda call: None)
    assert again.outcome == "ok"
    assert again.extra["bits"] == finals.extra["bits"]
    assert again.errors == finals.errors
    _, wrong = outcomes(lambda call: bump(call["dw"]))
    assert (wrong.outcome, wrong.note[:2]) == ("wrong", "dw")

    def last_bit(call: dict[str, Any]) -> None:
        if call["in"].x is not INPUTS.x:
            call["dx"].view(torch.int16)[0, 0] ^= 1

    _, other = outcomes(last_bit)
    assert other.outcome == "ok", "no error, and yet another order of additions"
    assert other.extra["bits"] != finals.extra["bits"]


# Two outputs, three matrices, and nothing that is summed over the rows or shared by them.
BLEND = RowOperation(
    "blend",
    Signature(rows("a"), rows_out("p"), rows("b"), row("s"), rows("c"), rows_out("q")),
    lambda a, b, s, c: {"p": (a * s, b), "q": (c * a,)},
)


def blend_bench(mistake: Mistake) -> tuple[Bench, Any]:
    M, N = 24, 8
    tensors = {name: torch.randn(M, N) for name in "abc"} | {"s": torch.randn(M)}

    def run(inputs: Any, outputs: dict[str, torch.Tensor | None], workspace: Any) -> None:
        given = {name: getattr(inputs, name).reshape(tensors[name].shape) for name in tensors}
        for name, found in evaluate(BLEND, given).items():
            if (out := outputs[name]) is not None:
                out.copy_(found)
        mistake({**outputs, "packed": [getattr(inputs, name).dim() == 3 for name in "abc"]})

    runner: Any = SimpleNamespace(run=run, workspace_bytes=256, clean_bytes=128)
    outputs = {name: Guarded((M, N), torch.float32, CPU) for name in "pq"}
    return Bench(runner, outputs, CPU), inputs_class(BLEND.signature)(**tensors)


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (lambda c: None, ""),
        (lambda c: c["p"] is None and bump(c["q"]), "q of a call without p is not that of"),
        (lambda c: c["q"] is None and bump(c["p"]), "p of a call without q is not that of"),
        (lambda c: all(c["packed"]) and bump(c["q"]), "q of a call with 8 packed heads is not"),
    ],
)
def test_call_options_are_those_of_the_signature(mistake: Mistake, said: str) -> None:
    made, inputs = blend_bench(mistake)
    found = check_call_options(made, inputs, BLEND.signature)
    assert found.startswith(said) if said else found == ""


def test_what_an_output_held_before_must_not_show() -> None:
    """A kernel that adds to what is there, or leaves something out, differs from run to run."""

    def lazy(call: dict[str, Any]) -> None:
        call["dx"].view(torch.uint8).view(-1)[5] = kept[0]

    own = bench(lazy)
    kept = own.outputs["dx"].inside[5:6]
    plain = own.run

    def run(*arguments: Any, **options: Any) -> None:
        kept[0] = own.outputs["dx"].inside[5]
        plain(*arguments, **options)

    kept = torch.zeros(1, dtype=torch.uint8)
    own.run = run  # type: ignore[method-assign]
    assert "dx of run" in check_repeats(own, INPUTS)
    assert check_repeats(bench(), INPUTS) == ""


def test_damage_outside_the_outputs_is_a_fault_of_accuracy() -> None:
    expected = RMSNORM_BACKWARD.bounds(PROBLEM, INPUTS)
    assert check_accuracy(bench(), INPUTS, expected).fault == ""
    for name in ("dx", "dw"):
        for place in (0, -1):
            own = bench()
            buffer = own.outputs[name].buffer
            own.runner.mistake = lambda c, b=buffer, p=place: b.__setitem__(p, 0)  # type: ignore[attr-defined]
            assert "wrote outside" in check_accuracy(own, INPUTS, expected).fault


def test_a_counter_that_is_left_changed_is_a_fault() -> None:
    expected = RMSNORM_BACKWARD.bounds(PROBLEM, INPUTS)
    own = bench(lambda call: call["workspace"].__setitem__(7, 1))
    assert "left a counter" in check_accuracy(own, INPUTS, expected).fault
    assert "left a counter" in check_repeats(own, INPUTS)
    scratch = bench(lambda call: call["workspace"].__setitem__(200, 1))
    assert check_accuracy(scratch, INPUTS, expected).fault == ""


def test_the_digest_knows_the_order_of_the_words_of_a_matrix() -> None:
    def swap(call: dict[str, Any]) -> None:
        words = call["dx"].view(torch.int32).view(-1)
        words[2], words[9] = words[9].clone(), words[2].clone()

    assert digest(bench(swap), INPUTS) != digest(bench(), INPUTS)


def test_the_best_floor_counts_not_the_last() -> None:
    evaluator = object.__new__(MeasuredEvaluator)
    evaluator._floors = {}
    for floor_us in (12.0, 10.0, 11.0):
        evaluator._update_floor(PROBLEM, floor_us)
    assert evaluator._floors == {PROBLEM: 10.0}


def test_ratios_are_to_the_floor_of_the_same_round() -> None:
    """A clock that changes from round to round changes both."""
    block = [[10.0, 20.0, 10.0, 20.0, 10.0], [20.0, 40.4, 20.2, 40.0, 20.0]]
    timing = collect(lambda: block, 1, None, (), lambda seconds: None)
    assert timing.ratios == (2.0,)


@pytest.mark.parametrize(("scatter", "noisy"), [(0.065, False), (0.067, True)])
def test_quartiles_that_are_far_apart_are_noise(scatter: float, noisy: bool) -> None:
    """They may be 5 % apart and 0.8 us, which is 1.6 % of a floor of 50 us."""
    times = [100.0 * (1 + scatter * (i % 3 - 1) / 2) for i in range(15)]
    assert bool(noise_in([[50.0] * 15, times])) is noisy


@pytest.mark.parametrize(("times", "off"), [(0.99, False), (-0.99, False), (1.01, True)])
@pytest.mark.parametrize(("unit", "slack"), [(0.125, 0.0), (0.0, 0.5), (0.125, 0.5)])
def test_an_element_may_be_off_by_its_unit_and_its_slack(
    unit: float, slack: float, times: float, off: bool
) -> None:
    ref = torch.full((3, 2), 4.0, dtype=torch.float64)
    out = ref.clone()
    out[2, 1] += times * (4.0 * unit * 1.001 + slack)
    _, found = compare("dx", out, ref, unit, torch.full((3, 1), slack, dtype=torch.float64))
    assert found.startswith("dx[2, 1] is ") if off else not found


@pytest.mark.parametrize("wrong", [("dx",), ("dw",), ("dx", "dw")])
def test_the_first_output_that_is_wrong_is_named(wrong: tuple[str, ...]) -> None:
    bounds = RMSNORM_BACKWARD.bounds(PROBLEM, INPUTS)
    outputs = {name: bound.reference.clone() for name, bound in bounds.items()}
    assert accuracy.compare_all(outputs, bounds).fault == ""
    for name in wrong:
        outputs[name].view(-1)[5] += 100.0
    assert accuracy.compare_all(outputs, bounds).fault.startswith(f"{wrong[0]}[")


@pytest.mark.parametrize("row", [0, 7, 9])
def test_every_chunk_of_rows_is_compared(row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "CHUNK_ELEMENTS", 80)  # two rows of forty
    reference = torch.zeros(10, 40)
    out = reference.clone()
    assert compare("dx", out, reference, 2.0**-8, torch.zeros(10, 1))[1] == ""
    out[row, 3] = out[9, 30:] = 1.0
    assert compare("dx", out, reference, 2.0**-8, torch.zeros(10, 1))[1] == (
        f"dx[{row}, 3] is 1, float64 gives 0; 11 elements are off"
    )


@pytest.mark.parametrize("shape", ["6x40:bf16:fp32", "6x40:fp16:fp32"])
def test_every_output_is_judged_by_its_own_dtype(shape: str) -> None:
    problem = Problem.parse(shape)
    bounds = RMSNORM_BACKWARD.bounds(problem, RMSNORM_BACKWARD.make_inputs(problem, CPU))
    assert bounds["dx"].unit == HALF_UNIT[problem.dtype]
    assert bounds["dw"].unit == HALF_UNIT[problem.weight_dtype]


def test_facts_of_a_device_name_what_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They go into studies and packages, and NVML and the list of GPUs are asked with them."""
    driver = SimpleNamespace(
        cuDriverGetVersion=lambda: (0, 13020),
        cuDeviceGet=lambda index: (0, f"handle {index}"),
        cuDeviceGetPCIBusId=lambda size, handle: (0, b"0000:1B:00.0\0\0"),
    )
    properties = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132, uuid="1b-2c")
    monkeypatch.setattr("cuda.bindings.driver", driver)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(session_module, "_driver_version", lambda: "580.95.05")
    assert session_module.device_facts(3) == {
        "name": "NVIDIA H200",
        "sms": 132,
        "uuid": "1b-2c",
        "bus_id": "0000:1B:00.0",
        "cuda_driver": "13.2",
        "driver": "580.95.05",
        "torch": torch.__version__,
    }
