"""The measures themselves, on CPU tensors: inputs, reference, error bounds, guards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from generator.evaluate.verify.accuracy import compare
from generator.evaluate.verify.guarded import GUARD_BYTES, Guarded
from generator.operations.operation import FP32_SLACK, HALF_UNIT, TORCH_DTYPE
from generator.operations.rmsnorm_backward import (
    Inputs,
    make_cancelling,
    make_inputs,
    make_reference,
)
from generator.problem import Problem
from normforge.serve.reference import reference_backward
from tests.support.samples import DTYPES

CPU = torch.device("cpu")
KINDS = [Problem(96, 160, dtype, weight) for dtype in DTYPES for weight in sorted({dtype, "fp32"})]

small_problems = st.builds(
    lambda M, N, dtype, wide: Problem(M, N, dtype, "fp32" if wide else dtype),
    st.integers(1, 40),
    st.integers(1, 300),
    st.sampled_from(DTYPES),
    st.booleans(),
)


def rounded(problem: Problem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """dx and dw as a perfect kernel leaves them: the float64 result, rounded once."""
    reference = make_reference(problem, inputs)
    dx = reference.outputs["dx"].to(TORCH_DTYPE[problem.dtype])
    return dx, reference.outputs["dw"].to(TORCH_DTYPE[problem.weight_dtype])


def faults(problem: Problem, inputs: Inputs, dx: torch.Tensor, dw: torch.Tensor) -> str:
    """Return what the accuracy check says about outputs."""
    reference = make_reference(problem, inputs)
    dx_slack, dw_slack = reference.scales["dx"] * FP32_SLACK, reference.scales["dw"] * FP32_SLACK
    _, in_dx = compare("dx", dx, reference.outputs["dx"], HALF_UNIT[problem.dtype], dx_slack)
    _, in_dw = compare("dw", dw, reference.outputs["dw"], HALF_UNIT[problem.weight_dtype], dw_slack)
    return in_dx or in_dw


# ---- Inputs and the reference --------------------------------------------------------------------


@settings(max_examples=40)
@given(small_problems, st.integers(0, 1000))
def test_reference_is_the_gradient_of_the_formula(problem: Problem, seed: int) -> None:
    inputs = make_inputs(problem, CPU, seed)
    reference = make_reference(problem, inputs)
    # rstd enters rounded to fp32, as the forward saved it: the formula with that very number has
    # autograd's derivative only where mean(x^2) is that of the rounded rstd, so eps is put there.
    x = inputs.x.double().requires_grad_()
    weight = inputs.weight.double().requires_grad_()
    eps = inputs.rstd.double()[:, None] ** -2 - x.detach().square().mean(1, keepdim=True)
    y = x * torch.rsqrt(x.square().mean(1, keepdim=True) + eps) * weight
    y.backward(inputs.dy.double())
    assert x.grad is not None
    assert weight.grad is not None
    torch.testing.assert_close(reference.outputs["dw"], weight.grad, rtol=1e-10, atol=1e-10)
    tight = (
        {"rtol": 1e-9, "atol": 1e-9} if problem.dtype == "fp32" else {"rtol": 1e-6, "atol": 1e-6}
    )
    torch.testing.assert_close(reference.outputs["dx"].double(), x.grad, **tight)


@given(small_problems, st.integers(0, 1000))
@settings(max_examples=20)
def test_inputs_follow_from_the_seed_and_have_the_problems_dtypes(
    problem: Problem, seed: int
) -> None:
    one, two = (make_inputs(problem, CPU, seed) for _ in range(2))
    for name in ("x", "dy", "rstd", "weight"):
        assert torch.equal(getattr(one, name), getattr(two, name))
    assert one.x.shape == one.dy.shape == (problem.M, problem.N)
    assert one.x.dtype == one.dy.dtype == TORCH_DTYPE[problem.dtype]
    assert one.weight.dtype == TORCH_DTYPE[problem.weight_dtype]
    assert one.rstd.dtype == torch.float32
    exact = torch.rsqrt(one.x.double().square().mean(1) + 1e-6)
    torch.testing.assert_close(one.rstd.double(), exact, rtol=2.0**-23, atol=0)


@pytest.mark.parametrize("problem", KINDS, ids=str)
def test_every_term_of_dx_shows_in_the_inputs(problem: Problem) -> None:
    """A kernel that leaves the correction out is far outside the bounds."""
    inputs = make_inputs(problem, CPU)
    _, dw = rounded(problem, inputs)
    without = inputs.rstd.double()[:, None] * inputs.dy.double() * inputs.weight.double()
    assert faults(problem, inputs, without.to(inputs.x.dtype), dw).startswith("dx[")


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_have_a_large_mean_in_every_row_and_a_small_dw(dtype: str) -> None:
    """A wrong mean shows in dx then, and one lost row in dw."""
    problem = Problem(256, 2048, dtype, dtype)
    inputs = make_inputs(problem, CPU)
    xhat = inputs.x.double() * inputs.rstd.double()[:, None]
    means = (xhat * inputs.weight.double() * inputs.dy.double()).mean(1)
    assert float(means.abs().min()) > 0.3
    reference = make_reference(problem, inputs)
    largest, least_scale = reference.outputs["dw"].abs().max(), reference.scales["dw"].min()
    assert float(largest) < 8 * problem.M**0.5 < float(least_scale)


def test_large_problems_are_worked_through_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are the same whatever the size of a chunk, dw but for its order of summation."""
    problem = Problem(37, 64, "fp32", "fp32")
    inputs = make_inputs(problem, CPU)
    whole = make_reference(problem, inputs)
    monkeypatch.setattr("generator.operations.operation.CHUNK_ELEMENTS", 5 * 64)
    chunked = make_reference(problem, inputs)
    assert torch.equal(whole.outputs["dx"], chunked.outputs["dx"])
    assert torch.equal(whole.scales["dx"], chunked.scales["dx"])
    torch.testing.assert_close(whole.outputs["dw"], chunked.outputs["dw"], rtol=1e-12, atol=1e-12)
    cancelling = make_cancelling(problem, inputs)
    assert torch.equal(cancelling.x[:18], cancelling.x[18:36])


# ---- Inputs on which the order of a sum shows ----------------------------------------------------


def dw_in_order(inputs: Inputs, order: torch.Tensor) -> torch.Tensor:
    """dw by adding the rows one after another in fp32, in this order."""
    terms = inputs.dy.float() * (inputs.x.float() * inputs.rstd[:, None])
    total = torch.zeros(terms.shape[1])
    for row in order.tolist():
        total += terms[row]
    return total


@pytest.mark.parametrize("problem", KINDS, ids=str)
def test_cancelling_inputs_show_any_other_order_in_the_rounded_dw(problem: Problem) -> None:
    inputs = make_cancelling(problem, make_inputs(problem, CPU))
    dtype = TORCH_DTYPE[problem.weight_dtype]
    in_order = torch.arange(problem.M)
    first = dw_in_order(inputs, in_order).to(dtype)
    assert torch.equal(first, dw_in_order(inputs, in_order).to(dtype))
    swapped = in_order.clone()
    swapped[[3, 60]] = swapped[[60, 3]]
    for order in (swapped, in_order.flip(0), torch.randperm(problem.M)):
        changed = (dw_in_order(inputs, order).to(dtype) != first).float().mean()
        assert changed > 0.1, "an order of summation does not show"


@pytest.mark.parametrize("problem", KINDS, ids=str)
def test_cancelling_inputs_leave_a_small_rest_of_large_terms(problem: Problem) -> None:
    inputs = make_cancelling(problem, make_inputs(problem, CPU))
    reference = make_reference(problem, inputs)
    assert float((reference.outputs["dw"].abs() / reference.scales["dw"]).median()) < 1e-2
    assert torch.isfinite(inputs.dy.float()).all()
    assert torch.isfinite(reference.outputs["dx"]).all()


def test_cancelling_inputs_of_one_row_are_the_inputs() -> None:
    problem = Problem(1, 8, "fp32", "fp32")
    inputs = make_inputs(problem, CPU)
    assert make_cancelling(problem, inputs) is inputs


# ---- Error bounds --------------------------------------------------------------------------------


@settings(max_examples=40)
@given(small_problems, st.integers(0, 1000))
def test_correctly_rounded_outputs_pass(problem: Problem, seed: int) -> None:
    inputs = make_inputs(problem, CPU, seed)
    assert faults(problem, inputs, *rounded(problem, inputs)) == ""
    cancelling = make_cancelling(problem, inputs, seed)
    assert faults(problem, cancelling, *rounded(problem, cancelling)) == ""


@settings(max_examples=20)
@given(small_problems, st.integers(0, 1000))
def test_plain_fp32_arithmetic_passes(problem: Problem, seed: int) -> None:
    """The bound leaves room for one rounding of every fp32 step, in any order."""
    inputs = make_inputs(problem, CPU, seed)
    outputs = reference_backward(inputs.dy, inputs.x, inputs.rstd, inputs.weight)
    assert faults(problem, inputs, *outputs) == ""


Damage = Callable[[Inputs, torch.Tensor, torch.Tensor], None]


def step(tensor: torch.Tensor, index: tuple[int, ...], units: int) -> None:
    """Move one element away from zero by `units` of its last place."""
    bits = tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
    bits[index] += units


def largest(tensor: torch.Tensor) -> tuple[int, ...]:
    flat = int(tensor.float().abs().argmax())
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), tensor.shape))


def lost_row(inputs: Inputs, dx: torch.Tensor, dw: torch.Tensor) -> None:
    terms = inputs.dy[7].double() * inputs.x[7].double() * inputs.rstd[7].double()
    dw -= terms.to(dw.dtype)


def one_nan_in_dx(inputs: Inputs, dx: torch.Tensor, dw: torch.Tensor) -> None:
    dx[-1, -1] = float("nan")


def one_infinity_in_dw(inputs: Inputs, dx: torch.Tensor, dw: torch.Tensor) -> None:
    dw[0] = float("inf")


def swapped_columns_of_dw(inputs: Inputs, dx: torch.Tensor, dw: torch.Tensor) -> None:
    dw[[4, 5]] = dw[[5, 4]]


def swapped_rows_of_dx(inputs: Inputs, dx: torch.Tensor, dw: torch.Tensor) -> None:
    dx[[4, 5]] = dx[[5, 4]]


def row_of_zeros(inputs: Inputs, dx: torch.Tensor, dw: torch.Tensor) -> None:
    dx[95] = 0


def doubled_dw(inputs: Inputs, dx: torch.Tensor, dw: torch.Tensor) -> None:
    dw *= 2


DAMAGES: list[tuple[Damage, str]] = [
    (lost_row, "dw["),
    (one_nan_in_dx, "dx[95, 159] is nan"),
    (one_infinity_in_dw, "dw[0] is inf"),
    (swapped_columns_of_dw, "dw["),
    (swapped_rows_of_dx, "dx["),
    (row_of_zeros, "dx[95, "),
    (doubled_dw, "dw["),
]


@pytest.mark.parametrize("problem", KINDS, ids=str)
@pytest.mark.parametrize(
    ("damage", "says"), DAMAGES, ids=lambda value: getattr(value, "__name__", "")
)
def test_damaged_output_is_caught_and_the_first_bad_element_named(
    problem: Problem, damage: Damage, says: str
) -> None:
    inputs = make_inputs(problem, CPU)
    dx, dw = rounded(problem, inputs)
    damage(inputs, dx, dw)
    fault = faults(problem, inputs, dx, dw)
    assert fault.startswith(says)
    assert "float64 gives" in fault


@pytest.mark.parametrize("problem", KINDS, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_two_units_in_the_last_place_are_caught(problem: Problem, sign: int) -> None:
    """The bound is a few hundred units for fp32, where it is one of fp32 arithmetic."""
    inputs = make_inputs(problem, CPU)
    good_dx, good_dw = rounded(problem, inputs)
    dx, dw = good_dx.clone(), good_dw.clone()
    place = largest(dx)
    step(dx, place, sign * (400 if problem.dtype == "fp32" else 2))
    assert faults(problem, inputs, dx, good_dw).startswith(f"dx{list(place)} is ")
    place = largest(dw)
    step(dw, place, sign * (4000 if problem.weight_dtype == "fp32" else 2))
    assert faults(problem, inputs, good_dx, dw).startswith(f"dw{list(place)} is ")


def test_number_of_bad_elements_is_told() -> None:
    problem = KINDS[0]
    inputs = make_inputs(problem, CPU)
    dx, dw = rounded(problem, inputs)
    dx[3, 5:8] = 1e4
    fault = faults(problem, inputs, dx, dw)
    assert fault.startswith("dx[3, 5] is ")
    assert fault.endswith("3 elements are off")


def test_comparison_in_chunks_names_the_place_in_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference = torch.randn(100, 4, dtype=torch.float64)
    out = reference.clone()
    out[77, 2] += 1
    slack = torch.zeros(100, 1)
    monkeypatch.setattr("generator.evaluate.verify.accuracy.CHUNK_ELEMENTS", 40)
    error, fault = compare("dx", out, reference, 2.0**-24, slack)
    assert fault.startswith("dx[77, 2] is ")
    norm = float(reference.norm())
    assert error == pytest.approx(1 / norm, rel=1e-12)


def test_overflow_is_right_where_the_result_overflows() -> None:
    reference = torch.tensor([[71056.8, -71056.8, 60000.0, 1.0]])
    slack = torch.zeros(1, 1)

    def fault(*out: float) -> str:
        return compare("dx", torch.tensor([out], dtype=torch.float16), reference, 2.0**-11, slack)[
            1
        ]

    inf = float("inf")
    assert fault(inf, -inf, 60000.0, 1.0) == ""
    assert fault(inf, inf, 60000.0, 1.0).startswith("dx[0, 1] is inf")
    assert fault(inf, -inf, inf, 1.0).startswith("dx[0, 2] is inf")
    assert fault(65504.0, -inf, 60000.0, 1.0).startswith("dx[0, 0] is 65504")
    assert fault(float("nan"), -inf, 60000.0, 1.0).startswith("dx[0, 0] is nan")


@given(st.integers(1, 30), st.integers(1, 30), st.floats(1e-6, 1.0))
@settings(max_examples=30)
def test_relative_error_is_that_of_the_norms(rows: int, columns: int, size: float) -> None:
    reference = torch.ones(rows, columns, dtype=torch.float64)
    error, fault = compare(
        "dx", reference * (1 + size), reference, 2.0, torch.zeros(rows, 1, dtype=torch.float64)
    )
    assert fault == ""
    assert error == pytest.approx(size, rel=1e-9)


# ---- Guards --------------------------------------------------------------------------------------


@given(st.integers(1, 700), st.sampled_from(DTYPES), st.data())
@settings(max_examples=40)
def test_write_outside_a_tensor_is_noticed(size: int, dtype: str, data: st.DataObject) -> None:
    guarded = Guarded((size,), TORCH_DTYPE[dtype], CPU)
    guarded.poison()
    guarded.tensor.fill_(1.0)
    assert guarded.intact(), "writes inside are no fault"
    total = len(guarded.buffer)
    outside = [
        data.draw(st.integers(0, GUARD_BYTES - 1)),
        data.draw(st.integers(GUARD_BYTES + guarded.bytes, total - 1)),
        GUARD_BYTES - 1,
        GUARD_BYTES + guarded.bytes,
        total - 1,
    ]
    place = data.draw(st.sampled_from(outside))
    guarded.buffer[place] ^= data.draw(st.integers(1, 255))
    assert not guarded.intact()


@pytest.mark.parametrize("dtype", DTYPES)
def test_poison_is_nan_in_every_dtype_and_stays_inside(dtype: str) -> None:
    guarded = Guarded((3, 5), TORCH_DTYPE[dtype], CPU)
    assert guarded.tensor.shape == (3, 5)
    assert guarded.tensor.data_ptr() % 256 == guarded.buffer.data_ptr() % 256
    guarded.poison()
    assert guarded.tensor.isnan().all()
    assert guarded.intact()


def test_weight_dtype_decides_the_bound_of_dw() -> None:
    """A bf16 rounding of dw is an error where the weight is fp32."""
    problem = Problem(96, 160, "bf16", "fp32")
    inputs = make_inputs(problem, CPU)
    dx, dw = rounded(problem, inputs)
    assert faults(problem, inputs, dx, dw.bfloat16().float()).startswith("dw[")
    narrow = replace(problem, weight_dtype="bf16")
    assert faults(narrow, inputs, dx, dw.bfloat16()) == ""


def test_guards_that_an_earlier_kernel_broke_are_put_back() -> None:
    guarded = Guarded((5,), torch.float32, torch.device("cpu"))
    guarded.buffer[0] = 0
    guarded.buffer[-1] = 0
    assert not guarded.intact()
    guarded.poison()
    assert not guarded.intact(), "poisoning is no excuse for what was done before"
    guarded.arm()
    assert guarded.intact()
