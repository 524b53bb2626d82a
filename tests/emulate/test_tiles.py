"""Forward kernels with the arithmetic of vLLM's Triton kernel: every bit of the order that
tests/support/triton_order.py has in PyTorch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from generator.emulate import forward as emulated
from generator.emulate.build import find_compiler
from generator.emulate.forward import run_forward
from generator.emulate.run import Schedule
from generator.kernels.forward import TILE_FORMS, ForwardVariant
from generator.kernels.render import render_forward
from generator.operations.rmsnorm_forward import EPS, ForwardInputs
from generator.problem import Problem
from generator.space.forward_space import tile_forwards
from tests.support.forward import H200, drawn, output_fault
from tests.support.triton_order import fused, rms_norm

SCHEDULES = [Schedule(1, 2), Schedule(2, 5), Schedule(3, 1000)]
ROWS = 48
# Multiples of 16 are summed in another way than others; a row ends in a tile, with one, or before
# its second half.
WIDTHS = {
    "bf16": (48, 1000, 2048, 4104),
    "fp16": (1040, 1023),
    "fp32": (64, 1000, 1024, 2640, 3001),
}

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


def uneven(problem: Problem) -> ForwardInputs:
    """Rows of elements of many magnitudes, and a residual. The sums of even ones hardly show in
    which order they were added, because each addition rounds off so little of the whole. Of every
    other row, the mean square is not much larger than eps."""
    inputs = drawn(problem, ROWS)
    generator = torch.Generator().manual_seed(1)
    exponents = torch.randint(-6, 7, inputs.x.shape, generator=generator)
    exponents[1::2] -= 13
    return replace(inputs, x=torch.ldexp(inputs.x.float(), exponents).to(inputs.x.dtype))


def of(form: str, dtype: str, N: int) -> ForwardVariant:
    """The variant that serves rows of N columns."""
    whole = N % 16 == 0
    (found,) = (
        v
        for v in tile_forwards(H200)
        if (v.form, v.dtype) == (form, dtype) and (v.vector_bytes == 16) == whole
    )
    return found


def differing(variant: ForwardVariant, inputs: ForwardInputs, form: str) -> int:
    """Rows of which y or rstd has other bits than in the order of `form`."""
    runs = run_forward(variant, inputs, SCHEDULES)
    assert runs.faults == []
    (found,) = runs.results
    x = inputs.x if inputs.residual is None else found["residual_out"]
    y, rstd = rms_norm(x, inputs.weight, EPS, form)
    other = (found["y"].view(torch.uint8) != y.view(torch.uint8)).any(1)
    return int((other | (found["rstd"] != rstd)).sum())


@pytest.mark.parametrize("form", TILE_FORMS)
@pytest.mark.parametrize(("dtype", "N"), [(d, N) for d, widths in WIDTHS.items() for N in widths])
def test_bits_are_those_of_the_order_in_pytorch(form: str, dtype: str, N: int) -> None:
    problem = Problem(ROWS, N, dtype, dtype)
    inputs = uneven(problem)
    variant = of(form, dtype, N)
    assert differing(variant, replace(inputs, residual=None), form) == 0
    assert differing(variant, inputs, form) == 0
    (found,) = run_forward(variant, inputs, SCHEDULES[:1]).results
    assert output_fault(problem, inputs, found) == ""


# The text in the template, and what takes its place.
PLANTED = {
    "warps in turn": ("load_shared(sums + 2)", "load_shared(sums + 3)"),
    "lanes in turn": (
        "warp_sum(sum_of_squares(values))",
        "[&] { float s = sum_of_squares(values); for (int m = 1; m < 32; m *= 2)"
        " s = __fadd_rn(s, shuffle_xor(s, m)); return s; }()",
    ),
    "no contraction": ("kElements > 1", "kElements > 8"),
    "eps added by itself": (
        "__fmaf_rn(reciprocal, sum, eps)",
        "__fadd_rn(__fmul_rn(reciprocal, sum), eps)",
    ),
    "runs of 32 bytes": ("kRun = 16 / sizeof(Element)", "kRun = 32 / sizeof(Element)"),
    "tiles from the last on": (
        "int begin = 0; begin < rows.columns; begin += kTileColumns",
        "int begin = (rows.columns - 1) / kTileColumns * kTileColumns; begin >= 0;"
        " begin -= kTileColumns",
    ),
}


@pytest.mark.parametrize("form", TILE_FORMS)
@pytest.mark.parametrize("bug", PLANTED)
def test_another_order_is_found(form: str, bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = PLANTED[bug]
    inputs = replace(uneven(Problem(ROWS, 2640, "fp32", "fp32")), residual=None)
    variant = of(form, "fp32", 2640)
    source = render_forward(variant)
    assert old in source
    changed = source.replace(old, new)
    if bug == "warps in turn":
        changed = changed.replace(
            "load_shared(sums + 1), load_shared(sums + 3)",
            "load_shared(sums + 1), load_shared(sums + 2)",
        )
    monkeypatch.setattr(emulated, "render_forward", lambda v: changed)
    assert differing(variant, inputs, form) > 0


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_two_orders_have_different_bits(dtype: str) -> None:
    inputs = replace(uneven(Problem(ROWS, 2048, dtype, dtype)), residual=None)
    assert differing(of("tiles_in_turn", dtype, 2048), inputs, "tiles_in_pairs") > 0


def test_fused_multiply_add_in_pytorch_rounds_once() -> None:
    one = torch.tensor(1.0)
    tiny = torch.tensor(2.0**-12)
    # 1 + 2^-24 is half way to the next float, and the last bit of the product decides.
    for last, wanted in ((2.0**-23, 1 + 2.0**-23), (0.0, 1.0), (-(2.0**-23), 1.0)):
        assert float(fused(tiny, tiny * (1 + last), one)) == wanted
