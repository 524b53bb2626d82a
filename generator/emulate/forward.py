"""The forward kernels on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from generator.emulate.build import NO_COMPILER, find_compiler
from generator.emulate.check import Check
from generator.emulate.request import Buffer, Request, fields_of
from generator.emulate.run import Layout, Schedule, execute
from generator.evaluate.verify.accuracy import compare_all
from generator.kernels.forward import ForwardVariant
from generator.kernels.render import render_forward
from generator.operations import RMSNORM_FORWARD
from generator.operations.rmsnorm_forward import EPS, ForwardInputs
from generator.problem import Problem
from normforge.launch.forward_call import ForwardExtent, pack_arguments, pack_changing
from normforge.launch.row_layout import RowLayout
from normforge.spec import FORWARD_KERNELS

FORWARD_SCHEDULES = (Schedule(1, 1), Schedule(2, 1000), Schedule(3, 1000))
_TENSORS = ("x", "residual", "weight", "y", "rstd", "residual_out")
"""In the order in which `pack_changing` has their addresses."""


@dataclass
class ForwardRuns:
    """Every different result of the schedules, by output: y and residual_out (M, N), rstd (M,); and
    one sentence for every schedule that found something."""

    results: list[Mapping[str, torch.Tensor]]
    faults: list[str]


def run_forward(
    variant: ForwardVariant,
    inputs: ForwardInputs,
    schedules: Sequence[Schedule],
    *,
    inner: int = 0,
    layout: Layout | None = None,
    sms: int = 2,
) -> ForwardRuns:
    """Run a forward once for every schedule. inputs: on the CPU; inner: x lies as `inner` rows and
    then a gap; layout: of x and the residual, while outputs have no space between rows; sms:
    multiprocessors, for CTAs that walk over the rows. Raises NormforgeError without a C++
    compiler."""
    M, N = inputs.x.shape
    spec, layout = variant.spec(sms), layout or Layout()
    stride, residual_stride = (N + layout.pads[i % len(layout.pads)] for i in range(2))
    rows_at = RowLayout(stride, inner, (inner + 1) * stride if inner else 0)
    buffers = _buffers(inputs, rows_at, RowLayout(residual_stride), layout.misaligned_bytes)
    extent = ForwardExtent(M, stride, rows_at.outer, residual_stride, N, inner)
    arguments = bytearray(pack_arguments(extent))
    pack_changing(arguments, 0, *[0] * len(_TENSORS), EPS, inputs.offset)
    request = Request(
        fields_of(spec) | {"grid": spec.grid(M)},
        tuple(buffers),
        bytes(arguments),
        [(8 * i, name) for i, name in enumerate(_TENSORS)],
    )
    kernel = FORWARD_KERNELS[inputs.residual is not None]
    runs = execute(render_forward(variant), request, schedules, kernel=kernel)
    distinct = dict.fromkeys(tuple(o.results.items()) for o in runs.outcomes if not o.fault)
    found = [{name: runs.results[name][i] for name, i in results} for results in distinct]
    return ForwardRuns([*found], runs.faults)


def _buffers(
    inputs: ForwardInputs, x_at: RowLayout, residual_at: RowLayout, misaligned: int
) -> Iterator[Buffer]:
    x, residual, weight = inputs.x, inputs.residual, inputs.weight
    yield Buffer("x", "rows", x.dtype, x.shape, x, x_at, misaligned)
    if residual is not None:
        yield Buffer("residual", "rows", x.dtype, x.shape, residual, residual_at, misaligned)
    if weight is not None:
        yield Buffer("weight", "columns", weight.dtype, weight.shape, weight)
    yield Buffer("y", "rows_out", x.dtype, x.shape, misaligned_bytes=misaligned)
    yield Buffer("rstd", "row_out", torch.float32, x.shape[:1])
    if residual is not None:
        yield Buffer("residual_out", "rows_out", x.dtype, x.shape, misaligned_bytes=misaligned)


def few_rows(variant: ForwardVariant, problem: Problem) -> Problem:
    """The problem with as few rows as show what a variant does."""
    return replace(problem, M=min(problem.M, 2 * variant.rows_per_cta * variant.rows_in_flight + 1))


def check_forward(variant: ForwardVariant, problem: Problem) -> Check:
    """Run a few schedules on a few rows of a problem, without and with a residual. Without a
    C++ compiler nothing is run, and the check's note says so."""
    if find_compiler() is None:
        return Check(variant.id, 0, note=NO_COMPILER)
    few = few_rows(variant, problem)
    errors: dict[str, float] = {}
    problems: list[str] = []
    distinct = 0
    for shape in (few, replace(few, residual=few.dtype)):
        inputs = RMSNORM_FORWARD.make_inputs(shape, torch.device("cpu"))
        runs = run_forward(variant, inputs, FORWARD_SCHEDULES, sms=1)
        problems += runs.faults
        distinct = max(distinct, len(runs.results))
        for found in runs.results:
            accuracy = compare_all(found, RMSNORM_FORWARD.bounds(shape, inputs))
            errors |= accuracy.errors
            problems += [accuracy.fault] if accuracy.fault else []
    if distinct > 1:
        problems.append("its bits change from schedule to schedule")
    return Check(variant.id, len(FORWARD_SCHEDULES), distinct, errors, tuple(problems))
