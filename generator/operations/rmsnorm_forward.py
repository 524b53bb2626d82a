"""The forward of RMSNorm: inputs, and what is wrong with outputs, by float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from generator.operations.rmsnorm_backward import CHUNK_ELEMENTS, FP32_SLACK, HALF_UNIT, TORCH_DTYPE
from generator.problem import Problem
from generator.runtime.serve.forward import reference_forward

EPS = 1e-6


@dataclass
class ForwardInputs:
    """x, residual: (M, N); weight: (N,)."""

    x: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor


def forward_inputs(problem: Problem, device: torch.device, seed: int = 0) -> ForwardInputs:
    """Random rows of different sizes, so that a row that gets another's rstd shows."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = TORCH_DTYPE[problem.dtype]
    x = torch.empty((problem.M, problem.N), dtype=dtype, device=device)
    residual = torch.empty_like(x)
    for tensor in (x, residual):
        for part in tensor.split(max(1, CHUNK_ELEMENTS // problem.N)):
            drawn = torch.randn(part.shape, generator=generator, device=device)
            size = torch.rand((len(part), 1), generator=generator, device=device)
            part.copy_(drawn * (0.5 + 3 * size))
    weight = 1 + 0.1 * torch.randn(problem.N, generator=generator, device=device)
    return ForwardInputs(x, residual, weight.to(TORCH_DTYPE[problem.weight_dtype]))


def output_fault(
    problem: Problem,
    inputs: ForwardInputs,
    outputs: Sequence[torch.Tensor],
    *,
    weight: bool = True,
    weight_offset: float = 0.0,
) -> str:
    """What is wrong with (y, rstd[, residual_out]) against float64; "" for nothing.

    y may be off by one rounding and FP32_SLACK of itself; residual_out not at all.
    """
    y, rstd, *stream = outputs
    for first in range(0, problem.M, step := max(1, CHUNK_ELEMENTS // problem.N)):
        part = slice(first, first + step)
        x = inputs.x[part]
        if stream:
            summed = (x.float() + inputs.residual[part].float()).to(x.dtype)
            if not torch.equal(stream[0][part], summed):
                return f"residual_out differs from the rounded sum in rows from {first}"
            x = summed
        given = inputs.weight.double() if weight else None
        exact, exact_rstd = reference_forward(x.double(), given, EPS, weight_offset)
        for name, out, ref, unit in (
            ("y", y[part], exact, HALF_UNIT[problem.dtype]),
            ("rstd", rstd[part], exact_rstd, HALF_UNIT["fp32"]),
        ):
            tiny = torch.finfo(out.dtype).tiny * torch.finfo(out.dtype).eps / 2
            error = (out.double() - ref).abs()
            bad = ~(error <= ref.abs() * (unit * 1.001 + FP32_SLACK) + tiny)
            if bool(bad.any()):
                row, column = (int(i) for i in bad.nonzero()[0])
                got, wanted = float(out[row, column]), float(ref[row, column])
                return f"{name}[{first + row}, {column}] is {got:.6g}, expected {wanted:.6g}"
    return ""
