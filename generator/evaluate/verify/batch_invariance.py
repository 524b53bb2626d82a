"""Checks that the bits of a batch-invariant kernel depend on the rows alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import torch

from generator.evaluate.verify.determinism import equal_bits
from generator.operations.rmsnorm_backward import Inputs
from generator.operations.rows import run_rows
from normforge.launch.kernel_arguments import DW_ADDED, DW_IN_FP32
from normforge.launch.loaded_kernel import LoadedKernel
from normforge.spec import CHUNK_ROWS, KernelSpec, ceil_div, plan_launch

CASES = 12
"""Random batches of rows that are checked of each finalist; each takes three to five launches."""
LEAST_ROWS = 4 * CHUNK_ROWS + 300
"""The fewest rows of the whole batch; smaller ones are repeated. Any kernel may be asked to serve
so many."""
_PADDING = (0, 64)
"""Elements between rows: a multiple of every vector."""


def check_batch_invariance(kernel: LoadedKernel, inputs: Inputs, seed: int = 0) -> str:
    """Runs random rows of a batch as batches of their own, on random numbers of SMs and with other
    strides. Compared bit by bit are dx with that of the whole batch, and dw in fp32 with that on
    other SMs and with the sum over micro-batches. inputs: of the whole batch, 2-D. Returns "" or
    what differed."""
    random = Random(seed)
    if len(inputs.x) < LEAST_ROWS:
        inputs = _repeated(inputs, ceil_div(LEAST_ROWS, len(inputs.x)))
    M = len(inputs.x)
    spec: KernelSpec = kernel.spec
    whole = _Batch(kernel, inputs, 0, M)
    dx, _ = whole.run(spec.sms)
    for _ in range(CASES):
        count = min(M, 1 + int(2 ** random.uniform(0, 14)))
        start = random.randint(0, M - count)
        batch = _Batch(kernel, inputs, start, start + count, random.choice(_PADDING))
        sms, other = random.randint(spec.cluster, spec.sms), random.randint(spec.cluster, spec.sms)
        part, dw = batch.run(sms)
        where = f"of rows {start} to {start + count} of {M} on {sms} SMs"
        if not equal_bits(part, dx[start : start + count]):
            return f"dx {where} is not that of the whole batch"
        if not equal_bits(batch.run(other)[1], dw):
            return f"dw {where} is not that on {other} SMs"
        chunks = (count - 1) // CHUNK_ROWS
        if chunks:
            inner = [start + CHUNK_ROWS * (1 + i) for i in range(chunks)]
            cuts = sorted(random.sample(inner, random.randint(1, chunks)))
            total = torch.zeros_like(dw)
            for first, last in pairwise((start, *cuts, start + count)):
                _Batch(kernel, inputs, first, last).run(random.choice((sms, other)), total)
            if not equal_bits(total, dw):
                return f"dw {where} is not that of micro-batches, cut at {cuts}"
    return ""


class _Batch:
    """Some rows of the inputs as a batch of their own."""

    def __init__(
        self, kernel: LoadedKernel, inputs: Inputs, start: int, stop: int, padding: int = 0
    ) -> None:
        self.kernel = kernel
        part = slice(start, stop)
        self.inputs = replace(
            inputs,
            x=_padded(inputs.x[part], padding),
            dy=_padded(inputs.dy[part], padding // 2),
            rstd=inputs.rstd[part],
            dresidual=None if inputs.dresidual is None else inputs.dresidual[part],
        )

    def run(self, sms: int, total: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return dx, and dw in fp32, with the grid of a GPU of `sms` multiprocessors. total: dw is
        added to it."""
        given, spec = self.inputs, self.kernel.spec
        M, N = given.x.shape
        launch = plan_launch(replace(spec, sms=sms), M)
        other = given.dresidual if spec.residual not in ("", spec.dtype) else None
        dx = torch.empty((M, N), dtype=given.x.dtype, device=given.x.device)
        dw = torch.empty(N, device=dx.device) if total is None else total
        workspace = torch.full((launch.workspace_bytes,), 0xFF, dtype=torch.uint8, device=dx.device)
        workspace[: launch.scratch_offset] = 0
        outputs = {"dx": dx, "dw": dw}
        if other is not None:
            outputs["dresidual_out"] = torch.empty_like(other)
        dw_mode = DW_IN_FP32 if total is None else DW_ADDED
        run_rows(self.kernel, launch, given, outputs, workspace, dw_mode)
        return dx, dw


def _repeated(inputs: Inputs, times: int) -> Inputs:
    return replace(
        inputs,
        x=inputs.x.repeat(times, 1),
        dy=inputs.dy.repeat(times, 1),
        rstd=inputs.rstd.repeat(times),
        dresidual=None if inputs.dresidual is None else inputs.dresidual.repeat(times, 1),
    )


def _padded(rows: torch.Tensor, padding: int) -> torch.Tensor:
    """Return the rows as a view of a matrix with a larger stride."""
    if not padding:
        return rows
    M, N = rows.shape
    wide = rows.new_empty((M, N + padding))
    wide[:, :N] = rows
    return wide[:, :N]
