"""The options of a call at run time, and the options of a problem, on the CPU."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from generator.emulate import check_variant, find_compiler
from generator.emulate.check import CPU, check_source, small_launch
from generator.emulate.run import CallOptions, Layout, Schedule, run_schedules
from generator.kernels.render import render
from generator.operations.rmsnorm_backward import make_inputs
from generator.problem import Problem
from generator.target import Target
from normforge.launch.kernel_arguments import DW_ADDED, DW_IN_FP32, gap_factor
from normforge.operations import RMSNORM_BACKWARD
from normforge.serve.options import SMALLEST_EPS
from tests.support.emulator import WITHOUT_DW, WITHOUT_DX, run_to_one_result, small_variant
from tests.support.samples import DETERMINISTIC, plain_variant, sample_variant

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

SHAPE = "42x1024:bf16"


@pytest.mark.parametrize("reduction", DETERMINISTIC)
def test_what_a_call_asks_for_has_the_bits_of_a_plain_call(reduction: str, target: Target) -> None:
    variant = small_variant(SHAPE, reduction, target)
    inputs = make_inputs(Problem.parse(SHAPE), CPU)
    plain = run_to_one_result(variant, inputs)
    assert torch.equal(run_to_one_result(variant, inputs, WITHOUT_DW)["dx"], plain["dx"])
    assert torch.equal(run_to_one_result(variant, inputs, WITHOUT_DX)["dw"], plain["dw"])

    wide = run_to_one_result(variant, inputs, CallOptions(dw_mode=DW_IN_FP32))["dw"]
    assert wide.dtype == torch.float32
    assert torch.equal(wide.to(torch.bfloat16), plain["dw"])
    start = torch.linspace(-3, 5, 1024)
    added = run_to_one_result(variant, inputs, CallOptions(dw_mode=DW_ADDED, added_to=start))["dw"]
    assert torch.equal(added, start + wide)
    assert not torch.equal(added, start)

    for inner in (3, 7, 42):
        packed = run_to_one_result(variant, inputs, CallOptions(inner=inner))
        assert torch.equal(packed["dx"], plain["dx"])
        assert torch.equal(packed["dw"], plain["dw"])


@pytest.mark.parametrize("weight", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("weight_in", ["registers", "smem"])
def test_no_weight_means_ones(weight: str, weight_in: str, target: Target) -> None:
    dtype = "fp16" if weight == "fp16" else "bf16"
    problem = Problem(42, 1024, dtype, weight)
    variant = plain_variant(problem, target, weight_in=weight_in, slice_columns=128)
    inputs = make_inputs(problem, CPU)
    ones = replace(inputs, weight=torch.ones_like(inputs.weight))
    expected, found = (
        run_to_one_result(variant, ones),
        run_to_one_result(variant, inputs, CallOptions(columns=False)),
    )
    assert torch.equal(found["dx"], expected["dx"])
    assert not torch.equal(found["dx"], run_to_one_result(variant, inputs)["dx"])


@given(heads=st.integers(2, 4096), tokens=st.integers(1, 1 << 20), data=st.data())
def test_gap_factor_divides_every_row(heads: int, tokens: int, data: st.DataObject) -> None:
    rows = heads * tokens
    factor = gap_factor(rows, heads)
    if rows * heads >= 1 << 32:
        assert factor == 0
        return
    token = data.draw(st.integers(0, tokens - 1))
    for row in {0, rows - 1, token * heads, token * heads + heads - 1}:
        assert factor * row >> 32 == row // heads


@pytest.mark.parametrize(
    ("shape", "pipeline", "reload"),
    [
        ("203x1024:bf16+offset", "direct", "none"),
        ("203x1024:bf16+residual", "async", "smem"),
        ("203x1024:bf16:fp32+residual_fp32", "bulk", "none"),
        ("203x1024:fp32+offset+residual", "bulk", "none"),
        ("203x1024:fp16+offset+residual_fp32", "async", "smem"),
        ("203x1024:fp16+offset+residual_fp32", "direct", "none"),
    ],
)
def test_options_of_a_problem_are_computed(
    shape: str, pipeline: str, reload: str, target: Target
) -> None:
    problem = Problem.parse(shape)
    variant = sample_variant(problem, target, 3, pipeline=pipeline, reload=reload)
    for layout in (Layout(), Layout((32, 64, 96, 128))):
        check = check_variant(variant, problem, schedules=8, layout=layout)
        assert check.problems == ()
        assert check.distinct_results == 1


def test_every_matrix_of_a_layout_may_have_a_stride_of_its_own(target: Target) -> None:
    """Also the one that is read behind the row sums."""
    problem = Problem.parse("42x1024:bf16+residual")
    variant = plain_variant(problem, target)
    source = render(variant)
    spec, launch = small_launch(variant, problem.M)
    layout = Layout((32, 64, 96, 128))
    assert len({*layout.pads_of(RMSNORM_BACKWARD.signature).values()}) == 4
    for name in ("dy", "x", "dx", "dresidual"):
        wrong = re.sub(rf"row \* (arguments|args)\.{name}_stride", "row * 1024", source)
        start = f"start(row, arguments.{name}_stride, "
        wrong = wrong.replace(start, "start(row, 1024, ")
        if wrong != source:
            check = check_source(wrong, spec, launch, problem, schedules=1, layout=layout)
            assert check.problems, name
        else:
            assert name == "x"  # read by the address of another


@pytest.mark.parametrize(
    ("shape", "old", "new", "found"),
    [
        ("42x1024:bf16+offset", "kOffset ? __fadd_rn(w, offset) : w", "w", r"dx\[.*float64 gives"),
        (
            "42x1024:bf16+residual",
            "out[i] = __fadd_rn(out[i], element<ResidualElement>(residuals[u][j].words, i));",
            ";",
            r"dx\[.*float64 gives",
        ),
        (
            "42x1024:bf16+residual_fp32",
            "store_residual(args.dresidual_out + row * args.dx_stride + column, out);",
            ";",
            r"dresidual_out\[0, 0\] was never written",
        ),
    ],
)
def test_option_that_is_left_out_is_found(
    shape: str, old: str, new: str, found: str, target: Target
) -> None:
    problem = Problem.parse(shape)
    variant = plain_variant(problem, target)
    source = render(variant)
    assert old in source
    spec, launch = small_launch(variant, problem.M)
    check = check_source(source.replace(old, new), spec, launch, problem, schedules=2)
    assert any(re.search(found, fault) for fault in check.problems), check.problems


def test_weight_that_is_not_there_is_not_read(target: Target) -> None:
    variant = small_variant(SHAPE, "separate", target)
    inputs = make_inputs(Problem.parse(SHAPE), CPU)
    spec, launch = small_launch(variant, 42)
    source = render(variant).replace("if (weight == nullptr)", "if (false)")
    runs = run_schedules(
        source,
        spec,
        launch,
        inputs,
        [Schedule(0, launch.grid)],
        call_options=CallOptions(columns=False),
    )
    assert runs.faults and "out of bounds" in runs.faults[0]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_dx_is_finite_as_far_as_smallest_eps_says(dtype: str, target: Target) -> None:
    """It overflows where the square of rstd does, for which reason there is such a limit."""
    problem = Problem.parse(f"6x1024:{dtype}")
    variant = plain_variant(problem, target)
    plain = make_inputs(problem, CPU)

    def finite(rms: float, gradient: float) -> bool:
        """Return True if dx is finite for rows of this size whose dy is xhat times the gradient,
        with eps = 0."""
        x = (plain.x.double() * rms).to(plain.x.dtype)
        rstd = torch.rsqrt(x.float().square().mean(-1))
        dy = (x.float() * rstd[:, None] * gradient).to(x.dtype)
        inputs = replace(plain, x=x, dy=dy, rstd=rstd, weight=torch.ones_like(plain.weight))
        return bool(run_to_one_result(variant, inputs)["dx"].isfinite().all())

    assert finite(SMALLEST_EPS**0.5 * 1.2, 2.0**31)  # mean(dy * xhat) is the gradient
    assert finite(2.0**-63, 1.0) and not finite(2.0**-65, 1.0)
