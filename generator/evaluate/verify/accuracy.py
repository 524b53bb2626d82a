"""Outputs against float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from generator.evaluate.verify.bench import Bench
from generator.operations.rmsnorm_backward import (
    CHUNK_ELEMENTS,
    HALF_UNIT,
    Inputs,
    Reference,
    slacks,
)


@dataclass
class Accuracy:
    """Errors as ||out - ref|| / ||ref||; fault is "" or the sentence that says what is wrong."""

    error_dx: float
    error_dw: float
    fault: str


def _first_bad(bad: torch.Tensor) -> tuple[int, ...]:
    flat = int(bad.flatten().to(torch.uint8).argmax())
    place = []
    for size in reversed(bad.shape):
        place.append(flat % size)
        flat //= size
    return tuple(reversed(place))


def compare(
    name: str, out: torch.Tensor, ref: torch.Tensor, unit: float, slack: torch.Tensor
) -> tuple[float, str]:
    """The relative error of `out` and "" or the first element outside `unit * |ref| + slack`.

    out, ref: same shape; slack broadcasts against them. Works in chunks of rows.
    """
    square_error = square_ref = 0.0
    fault = ""
    rows = max(1, CHUNK_ELEMENTS // out[0].numel()) if out.dim() > 1 else out.numel()
    for start in range(0, out.shape[0], rows):
        part = slice(start, start + rows)
        wide = ref[part].to(torch.float64 if ref.dtype == torch.float64 else torch.float32)
        error = (out[part].to(wide.dtype) - wide).abs()
        if out.dtype == torch.float16:  # may overflow, and rightly so
            rounded = wide.to(out.dtype)
            error = error.masked_fill(rounded.isinf() & (out[part] == rounded), 0.0)
        limit = wide.abs() * (unit * 1.001) + slack[part].to(wide.dtype)
        bad = ~(error <= limit)
        if not fault and bool(bad.any()):
            at = _first_bad(bad)
            index = [at[0] + start, *at[1:]]
            fault = (
                f"{name}{index} is {float(out[part][at]):.9g}, "
                f"float64 gives {float(wide[at]):.9g}; {int(bad.sum())} elements are off"
            )
        square_error += float(error.double().square().sum())
        square_ref += float(wide.double().square().sum())
    return (square_error / max(square_ref, 1e-300)) ** 0.5, fault


def check_accuracy(bench: Bench, inputs: Inputs, reference: Reference) -> Accuracy:
    """One run on poisoned outputs and workspace against the reference."""
    bench.arm()
    bench.poison()
    bench.run(inputs)
    problem = bench.problem
    slack_dx, slack_dw = slacks(problem, reference)
    error_dx, fault_dx = compare(
        "dx", bench.dx.tensor, reference.dx, HALF_UNIT[problem.dtype], slack_dx
    )
    error_dw, fault_dw = compare(
        "dw", bench.dw.tensor, reference.dw, HALF_UNIT[problem.weight_dtype], slack_dw
    )
    fault = fault_dx or fault_dw
    if bench.dresidual is not None:
        unit = HALF_UNIT[problem.residual]
        _, second = compare("dresidual_out", bench.dresidual.tensor, reference.dx, unit, slack_dx)
        fault = fault or second
    return Accuracy(error_dx, error_dw, fault or bench.fault())
