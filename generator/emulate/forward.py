"""The forward kernels in the emulator, which knows the backward's buffers.

An adapter in place of the backward's kernel hands the forward buffers of the same kind: x is x, y
is dx, residual and residual_out are dresidual and its second output, and rstd is dw in fp32, which
therefore needs at least as many columns as there are rows. `group` says that there is no weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from generator.emulate.run import Layout, Outputs, Schedule, execute, float_bits, row_fields
from generator.evaluate.verify.accuracy import compare_all
from generator.kernels.forward import ForwardVariant, render_forward
from generator.operations import RMSNORM_FORWARD
from generator.operations.operation import TORCH_DTYPE
from generator.operations.rmsnorm_forward import EPS, ForwardInputs
from generator.problem import Problem
from normforge.launch.kernel_arguments import DW_IN_FP32

_ADAPTER = """
// ---- In place of the backward's kernel --------------------------------------------------------

#include "machine.h"

extern "C" void main_kernel(const normforge::Arguments& b) {{
  const ::Arguments forward{{
      static_cast<const Element*>(b.x), static_cast<const Element*>(b.dresidual),
      b.group ? nullptr : static_cast<const WeightElement*>(b.weight), static_cast<Element*>(b.dx),
      static_cast<float*>(b.dw), static_cast<Element*>(b.dresidual_out), {eps}f, b.weight_offset,
      b.rows, b.x_stride, {inner} * b.x_stride + b.x_gap, b.dresidual_stride, b.columns, {inner}}};
  if (forward.residual != nullptr) run<true>(forward);
  else run<false>(forward);
  if (blockIdx.x == 0 && threadIdx.x == 0)
    for (long long i = b.rows; i < b.columns; ++i) store_rstd(forward.rstd + i, 0.0f);
}}
"""

FORWARD_SCHEDULES = (Schedule(1, 1), Schedule(2, 1000), Schedule(3, 1000))


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
    """Run a forward once for every schedule. inputs: of M <= N rows, on the CPU; inner: x lies as
    `inner` rows and then a gap; sms: multiprocessors, for CTAs that walk over the rows. Raises
    NormforgeError without a C++ compiler."""
    x, residual = inputs.x, inputs.residual
    M, N = x.shape
    spec = variant.spec(sms)
    fields = row_fields(spec, x, layout or Layout(), inner) | {
        "grid": spec.grid(M),
        "ordered_adds": 1,
        "partial_columns": variant.columns if spec.exact else N,
        "group": int(inputs.weight is None),
        "dw_mode": DW_IN_FP32,
        "dw_item": 4,
        "weight_offset": float_bits(inputs.offset),
        "residual_item": 0 if residual is None else residual.element_size(),
        "residual_out": int(residual is not None),
    }
    weight = inputs.weight
    if weight is None:
        weight = torch.ones(N, dtype=TORCH_DTYPE[variant.weight_dtype])
    tensors = [x, x, torch.ones(M), weight] + ([] if residual is None else [residual])
    rows = (x.dtype, (M, N))
    outputs = Outputs(dx=rows, dw=(torch.float32, (N,)), dresidual_out=rows)
    adapter = _ADAPTER.format(eps=f"{EPS:.9e}", inner=inner)
    source = render_forward(variant) + adapter
    runs = execute(source, fields, tensors, outputs, schedules)
    distinct = dict.fromkeys((o.dx, o.dw, o.residual) for o in runs.outcomes if not o.fault)
    results: list[Mapping[str, torch.Tensor]] = []
    for dx, dw, out in distinct:
        found = {"y": runs.dx[dx or 0], "rstd": runs.dw[dw or 0][:M]}
        if residual is not None:
            found["residual_out"] = runs.residual[out or 0]
        results.append(found)
    return ForwardRuns(results, runs.faults)


def few_rows(variant: ForwardVariant, problem: Problem) -> Problem:
    """The problem with as few rows as show what a variant does."""
    rows = 2 * variant.rows_per_cta * variant.rows_in_flight + 1
    return replace(problem, M=min(problem.M, problem.N, rows))


def emulate_forward(variant: ForwardVariant, problem: Problem) -> str:
    """What a few schedules on a few rows of a problem find, without and with a residual: one
    sentence, "" for nothing. Raises NormforgeError without a C++ compiler."""
    few = few_rows(variant, problem)
    for shape in (few, replace(few, residual=few.dtype)):
        inputs = RMSNORM_FORWARD.make_inputs(shape, torch.device("cpu"))
        runs = run_forward(variant, inputs, FORWARD_SCHEDULES, sms=1)
        if runs.faults:
            return runs.faults[0]
        if len(runs.results) != 1:
            return "its bits change from schedule to schedule"
        if fault := compare_all(runs.results[0], RMSNORM_FORWARD.bounds(shape, inputs)).fault:
            return fault
    return ""
