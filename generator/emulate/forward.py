"""The forward kernels in the executor, which knows the backward's buffers.

An adapter in place of the backward's kernel hands the forward buffers of the same kind: x is x, y
is dx, residual and residual_out are dresidual and its second output, and rstd is dw in fp32, which
therefore needs at least as many columns as there are rows. `group` says that there is no weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import torch

from generator.emulate.run import CallOptions, Layout, Schedule, run_schedules
from generator.kernels.forward import ForwardVariant, render_forward
from generator.operations.rmsnorm_backward import TORCH_DTYPE, Inputs
from generator.operations.rmsnorm_forward import EPS, forward_inputs, output_fault
from generator.problem import Problem
from generator.runtime.launch.launch import DW_IN_FP32

_ADAPTER = """
// ---- In place of the backward's kernel --------------------------------------------------------

#include "machine.h"

extern "C" void rmsnorm_backward(const normforge::Arguments& b) {{
  const Arguments forward{{
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
# A dtype of the same size that the executor takes for another one than x's.
_STAND_IN = {"bf16": ("fp16", torch.float16), "fp16": ("bf16", torch.bfloat16)}


class _Launch(SimpleNamespace):
    """A launch in which everything that is the backward's own is 0."""

    def __getattr__(self, name: str) -> int:
        return 0


FORWARD_SCHEDULES = (Schedule(1, 1), Schedule(2, 1000), Schedule(3, 1000))


@dataclass
class ForwardRuns:
    """Every different result of the schedules, (y, rstd) or (y, rstd, residual_out) with y (M, N)
    and rstd (M,), and one sentence for every schedule that found something."""

    results: list[tuple[torch.Tensor, ...]]
    faults: list[str]


def run_forward(
    variant: ForwardVariant,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    schedules: Sequence[Schedule],
    *,
    eps: float = EPS,
    weight_offset: float = 0.0,
    residual: torch.Tensor | None = None,
    inner: int = 0,
    layout: Layout | None = None,
    sms: int = 2,
) -> ForwardRuns:
    """Run a forward once for every schedule.

    x: (M, N) with M <= N, on the CPU; residual: like x, of two bytes an element; inner: x lies as
    `inner` rows and then a gap; sms: multiprocessors, for CTAs that walk over the rows. Raises
    NormforgeError without a C++ compiler.
    """
    M, N = x.shape
    spec = variant.spec(sms)
    stand_in, same_size = _STAND_IN.get(variant.dtype, ("", torch.float32))
    stored = TORCH_DTYPE[variant.weight_dtype]
    known = SimpleNamespace(
        **vars(spec),
        dependent=False,
        determinism="gpu_to_gpu",
        sum_threads=0,
        columns=variant.columns,
        partial_stride=4,
        residual="" if residual is None else stand_in,
    )
    launch = _Launch(grid=spec.grid(M), group=int(weight is None))
    inputs = Inputs(
        x=x,
        dy=x,
        rstd=torch.ones(M),
        weight=torch.ones(N, dtype=stored) if weight is None else weight,
        residual=None if residual is None else residual.view(same_size),
        offset=weight_offset,
    )
    adapter = _ADAPTER.format(eps=f"{eps:.9e}", inner=inner)
    runs = run_schedules(
        render_forward(variant) + adapter,
        cast(Any, known),
        cast(Any, launch),
        inputs,
        schedules,
        layout=layout,
        call_options=CallOptions(dw_mode=DW_IN_FP32, inner=inner),
    )
    found = dict.fromkeys((o.dx, o.dw, o.residual) for o in runs.outcomes if not o.fault)
    results: list[tuple[torch.Tensor, ...]] = []
    for dx, dw, out in found:
        y, rstd = runs.dx[dx or 0], runs.dw[dw or 0][:M]
        stream = () if residual is None else (runs.residual[out or 0].view(x.dtype),)
        results.append((y, rstd, *stream))
    return ForwardRuns(results, runs.faults)


def emulate_forward(variant: ForwardVariant, problem: Problem) -> str:
    """What a few schedules on a few rows of a problem find, without and (for two-byte rows) with a
    residual: one sentence, "" for nothing. Raises NormforgeError without a C++ compiler."""
    rows = 2 * variant.rows_per_cta * variant.rows_in_flight + 1
    few = replace(problem, M=min(problem.M, problem.N, rows))
    inputs = forward_inputs(few, torch.device("cpu"))
    for residual in (None, inputs.residual) if problem.itemsize == 2 else (None,):
        runs = run_forward(
            variant, inputs.x, inputs.weight, FORWARD_SCHEDULES, residual=residual, sms=1
        )
        if runs.faults:
            return runs.faults[0]
        if len(runs.results) != 1:
            return "its bits change from schedule to schedule"
        y, rstd, *stream = runs.results[0]
        if fault := output_fault(few, inputs, (y, rstd[:, None], *stream)):
            return fault
    return ""
